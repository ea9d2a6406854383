"""What is shown of a training of fairseq that a command of this package started."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from io import StringIO

import pytest
from fairseq.logging import metrics, progress_bar

from mlsm_plugin.core.files import progress
from mlsm_plugin.core.files.output_lock import SHOWS_PROGRESS
from mlsm_plugin.fairseq_plugin.compat import training_progress
from mlsm_plugin.fairseq_plugin.compat.training_progress import ShownProgressBar

INTERVAL = 0.05
CONFIG = {"optimization": {"max_update": 40}, "distributed_training": {"distributed_rank": 0}}


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", INTERVAL)
    monkeypatch.setattr(training_progress, "SECONDS_BETWEEN_FIGURES", 0.0)
    yield
    metrics.reset()


def train(batches: int, *, rank: int = 0) -> None:
    """What fairseq does in an epoch, after 10 updates."""
    bar = ShownProgressBar([[]] * batches, epoch=2, log_interval=1000)
    bar.update_config({**CONFIG, "distributed_training": {"distributed_rank": rank}})
    metrics.log_scalar("num_updates", 10, weight=0)
    for number, _ in enumerate(bar):
        if number == 3:
            metrics.reset_meters("train_inner")  # as after a line of the log
            continue
        with metrics.aggregate("train_inner"):
            metrics.log_scalar("loss", 5.25)
            metrics.log_scalar("wps", 3210)
            metrics.log_scalar("num_updates", 11 + number, weight=0)
        logging.getLogger("fairseq_cli.train").warning("a line of the log")
        time.sleep(INTERVAL)


def test_a_log_has_a_line_in_every_interval(capsys: pytest.CaptureFixture[str]) -> None:
    train(8)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training")]
    assert len(lines) >= 6
    assert any(re.match(r"training, loss 5\.250, 3,210 tokens/s: \d+%, ", line) for line in lines)
    assert all("/40 update" in line and " left" in line for line in lines)


def test_a_terminal_has_the_bar_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", Terminal())
    handler = logging.StreamHandler(terminal)
    logging.getLogger().addHandler(handler)
    try:
        train(8)
    finally:
        logging.getLogger().removeHandler(handler)
    shown = terminal.getvalue()
    assert "training:  25%|" in shown
    assert "training, loss 5.250, 3,210 tokens/s:" in shown
    for line in shown.split("a line of the log")[:-1]:
        assert not line.rpartition("\r")[2].strip()  # the bar is cleared before
    assert not handler.filters


def test_other_processes_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    train(3, rank=1)
    assert "training" not in capsys.readouterr().err.replace("fairseq_cli.train", "")


def test_a_validation_counts_batches(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in ShownProgressBar([[]] * 4, epoch=2, prefix="valid on 'valid' subset"):
        time.sleep(INTERVAL)
    assert "validating: " in capsys.readouterr().err


def test_only_children_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = progress_bar.SimpleProgressBar
    monkeypatch.setattr(progress_bar, "SimpleProgressBar", before)
    monkeypatch.delitem(os.environ, SHOWS_PROGRESS, raising=False)
    training_progress.apply()
    assert progress_bar.SimpleProgressBar is before
    monkeypatch.setitem(os.environ, SHOWS_PROGRESS, "1")
    training_progress.apply()
    assert progress_bar.SimpleProgressBar is ShownProgressBar
