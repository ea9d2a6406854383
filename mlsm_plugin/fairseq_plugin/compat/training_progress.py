"""The progress of ``fairseq-train`` where a command of this package started it: a bar, or a line every 20 seconds.

fairseq itself is silent for ``--log-interval`` updates, and its bars show an epoch, not the run. Before the first
update, it prints its configuration, 18,000 characters, and the modules of the model. These are not shown: the settings
are in each checkpoint.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fairseq.logging import metrics, progress_bar

from mlsm_plugin.core.files.output_lock import SHOWS_PROGRESS
from mlsm_plugin.core.files.progress import Progress

SECONDS_BETWEEN_FIGURES = 1.0


class ShownProgressBar(progress_bar.SimpleProgressBar):
    """fairseq's log lines, beside which the run or the validation has a bar."""

    max_update = 0  # of a training
    is_first_process = True

    def update_config(self, config: dict[str, Any]) -> None:
        """What fairseq calls for a training, and not for a validation."""
        self.max_update = int(config["optimization"]["max_update"] or 0)
        self.is_first_process = not config["distributed_training"]["distributed_rank"]
        super().update_config(config)

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        if not self.is_first_process:
            return batches
        return self._training(batches) if self.max_update else self._other(batches)

    def _training(self, batches: Iterator[Any]) -> Iterator[Any]:
        shown = time.monotonic()
        with _bar(total=self.max_update, initial=_updates(), desc="training", unit="update") as bar:
            for batch in batches:
                yield batch
                bar.update(_updates() - bar.n)
                if time.monotonic() - shown >= SECONDS_BETWEEN_FIGURES:  # to read them waits for a GPU
                    shown = time.monotonic()
                    bar.set_description_str(_description(bar.desc), refresh=False)

    def _other(self, batches: Iterator[Any]) -> Iterator[Any]:
        name = "validating" if " on " in self.prefix else "training"
        with _bar(total=len(self), desc=name, unit="batch") as bar:
            for batch in batches:
                yield batch
                bar.update(1)


def apply() -> None:
    """Show the progress of this process, if a command of this package started it (idempotent)."""
    if SHOWS_PROGRESS in os.environ:
        progress_bar.SimpleProgressBar = ShownProgressBar
        for handler in logging.getLogger().handlers:  # the file of --log-file has a handler of its own
            handler.addFilter(_is_message)


def _is_message(record: logging.LogRecord) -> bool:
    """False for the configuration and the model, which fairseq logs as objects."""
    return isinstance(record.msg, str) or record.levelno > logging.INFO


@contextmanager
def _bar(**options: Any) -> Iterator[Progress]:
    """A bar that log lines on the same terminal do not break."""
    handlers = logging.getLogger().handlers if sys.stderr.isatty() and sys.stdout.isatty() else []
    with Progress(leave=False, **options) as bar:

        def clear(record: logging.LogRecord) -> bool:
            bar.clear()
            return True

        for handler in handlers:
            handler.addFilter(clear)
        try:
            yield bar
        finally:
            for handler in handlers:
                handler.removeFilter(clear)


def _updates() -> int:
    """The number of updates that the run has made."""
    meter = metrics.get_meter("default", "num_updates")
    return 0 if meter is None or meter.val is None else int(meter.val)


def _description(before: str) -> str:
    """The last loss and the speed; ``before`` directly after a log line, when there are none."""
    figures = metrics.get_smoothed_values("train_inner")
    loss = figures.get("loss")
    speed = figures.get("wps")
    if loss is None or speed is None:
        return before
    return f"training, loss {float(loss):.3f}, {float(speed):,.0f} tokens/s"
