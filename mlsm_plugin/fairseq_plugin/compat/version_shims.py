"""Workarounds for fairseq-fixed with current Python, torch and numpy, and one-line errors of its commands."""

import argparse
import atexit
import builtins
import functools
import itertools
import logging
import os
import queue
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from fairseq import trainer
from fairseq import utils as fairseq_utils
from fairseq.data import iterators, token_block_dataset
from fairseq.dataclass import FairseqDataclass
from omegaconf import OmegaConf
from torch.multiprocessing import ProcessRaisedException

logger = logging.getLogger(__name__)

PACKAGE_DIR = str(Path(__file__).resolve().parents[2])


def apply() -> None:
    """Apply all shims (idempotent)."""
    torch.serialization.add_safe_globals([argparse.Namespace])  # fairseq's checkpoints hold one
    _restore_numpy_compat()
    _accept_own_user_dir()
    _report_user_errors_in_one_line()
    _stop_loading_before_exit()
    _end_workers_with_their_loader()
    for begin, category, module in OLD_CALLS:
        warnings.filterwarnings("ignore", begin, category, module)
    logging.getLogger(trainer.__name__).addFilter(_is_no_missing_bias)


def _restore_numpy_compat() -> None:
    """Provide ``np.compat.long``, which numpy >= 2 lacks and fairseq's TokenBlockDataset uses in 'eos' mode."""
    if hasattr(np, "compat"):
        return
    if not isinstance(token_block_dataset.np, types.SimpleNamespace):
        numpy_names = {name: getattr(np, name) for name in np.__all__}
        with_compat = types.SimpleNamespace(**numpy_names)
        with_compat.compat = types.SimpleNamespace(long=np.int64)
        token_block_dataset.np = with_compat


def _accept_own_user_dir() -> None:
    """Let ``--user-dir`` name this package by any path; fairseq rejects another spelling of an imported package."""
    original = fairseq_utils.import_user_module
    if getattr(original, "accepts_own_user_dir", False):
        return

    @functools.wraps(original)
    def import_user_module(args: argparse.Namespace) -> None:
        user_dir = getattr(args, "user_dir", None)
        if user_dir is not None and (_is_this_package(user_dir) or _has_only_its_name(user_dir)):
            return
        original(args)

    import_user_module.accepts_own_user_dir = True  # type: ignore[attr-defined]
    fairseq_utils.import_user_module = import_user_module


def _is_this_package(user_dir: str) -> bool:
    path = os.path.abspath(user_dir)
    if os.path.exists(path):
        return os.path.realpath(path) == PACKAGE_DIR
    # fairseq looks for a bare name in the folder that it is installed in
    return os.path.normpath(user_dir) == os.path.basename(PACKAGE_DIR)


def _has_only_its_name(user_dir: str) -> bool:
    """Whether a folder has this package's name but is not a package, so that Python imports the installed package."""
    path = os.path.abspath(user_dir)
    is_package = os.path.exists(os.path.join(path, "__init__.py"))
    if os.path.basename(path) != os.path.basename(PACKAGE_DIR) or not os.path.isdir(path) or is_package:
        return False
    _say_what_is_imported(path)
    return True


@functools.cache
def _say_what_is_imported(path: str) -> None:
    logger.warning("--user-dir %s is not the package; the installed one is used: %s", path, PACKAGE_DIR)


def is_fairseq_command() -> bool:
    """Whether this process is a command of fairseq, started by name or as a module."""
    main_module = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = os.path.basename(sys.argv[0] if sys.argv else "")
    return program.startswith("fairseq") or getattr(main_module, "name", "").startswith("fairseq_cli")


def _report_user_errors_in_one_line() -> None:
    """Let fairseq's commands print this package's errors for users in one line instead of a traceback."""
    if not is_fairseq_command():
        return
    program = os.path.basename(sys.argv[0])
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        text = _text_for_user(error.with_traceback(traceback))
        if text is None or os.environ.get("MLSM_TRACEBACK"):
            previous(kind, error, traceback)
        else:
            print(f"{program}: error: {' '.join(text.split())}", file=sys.stderr)

    sys.excepthook = excepthook


def _stop_loading_before_exit() -> None:
    """Let fairseq's background loader finish its batch before Python exits.

    After a run that ends within an epoch, Python kills that thread when it returns from torch. The C++ code of torch
    then aborts the process, so a complete, saved run ends with exit status 134.
    """
    original = iterators.BackgroundConsumer
    if getattr(original, "stops_before_exit", False):
        return
    exiting = threading.Event()
    consumers: weakref.WeakSet[iterators.BackgroundConsumer] = weakref.WeakSet()

    class BackgroundConsumer(original):  # type: ignore[misc,valid-type]
        stops_before_exit = True

        def __init__(self, queue: queue.Queue[object], source: Iterable[object], *args: object) -> None:
            super().__init__(queue, itertools.takewhile(lambda _: not exiting.is_set(), source), *args)
            consumers.add(self)

        def run(self) -> None:
            super().run()
            if self.count == self._max_len:
                # at its end, a batch later with --skip-remainder-batch, a loader of torch ends its workers
                for _ in itertools.islice(self._source, 2):
                    pass

    def wait_for_consumers(seconds: float = 10.0) -> None:
        exiting.set()
        deadline = time.monotonic() + seconds
        for consumer in list(consumers):
            while consumer.is_alive() and time.monotonic() < deadline:
                # it may be waiting for room in its queue, or preparing another batch although the queue is full
                with suppress(queue.Empty):
                    consumer._queue.get_nowait()
                consumer.join(0.01)

    iterators.BackgroundConsumer = BackgroundConsumer
    atexit.register(wait_for_consumers)


def _end_workers_with_their_loader() -> None:
    """Let the workers of a loader end with its last batch, unless the next epoch uses the same loader.

    fairseq keeps them for another epoch, but mostly makes a new loader. Each validation then waited five seconds for
    the workers of an earlier one, until torch killed them. Only the thread of a buffer reads a loader to its end, so a
    loader with workers has a buffer of one batch or more.
    """
    original = iterators.EpochBatchIterator.__init__
    if getattr(original, "ends_workers", False):
        return

    @functools.wraps(original)
    def init(self: iterators.EpochBatchIterator, *args: object, **options: object) -> None:
        original(self, *args, **options)
        self.persistent_workers = self.persistent_workers and self.reuse_dataloader
        if self.num_workers > 0:
            self.buffer_size = max(1, self.buffer_size)

    init.ends_workers = True  # type: ignore[attr-defined]
    iterators.EpochBatchIterator.__init__ = init


def _text_for_user(error: BaseException) -> str | None:
    """The text of an error that this package raised for the user, or of any error about a file."""
    if isinstance(error, ProcessRaisedException):
        return _text_of_rank(str(error))
    shown = _error_of_package(error)
    if shown is None and isinstance(error, OSError) and error.filename:
        shown = error
    if isinstance(shown, OSError) and shown.filename:
        return f"{shown.filename}: {shown.strerror}"
    return None if shown is None else str(shown)


def _text_of_rank(printed: str) -> str | None:
    """As :func:`_error_of_package`, from the tracebacks that a process printed, causes first."""
    for traceback in printed.split("Traceback (most recent call last):\n")[1:]:
        frames: list[str] = []
        text: list[str] = []
        for line in traceback.partition("\n\n")[0].splitlines():
            (frames if line.startswith(" ") else text).append(line)
        files = [line for line in frames if line.startswith('  File "')]
        name, _, message = " ".join(text).partition(": ")
        kind = getattr(builtins, name, None)
        from_package = files and files[-1].startswith(f'  File "{PACKAGE_DIR}{os.sep}')
        if from_package and isinstance(kind, type) and issubclass(kind, (ValueError, OSError)):
            return message
    return None


def _error_of_package(error: BaseException | None) -> BaseException | None:
    """The error, or a cause of it, that this package raised; fairseq replaces some errors by general ones."""
    for cause in causes(error):
        if isinstance(cause, (ValueError, OSError)) and _raised_here(cause.__traceback__):
            return cause
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _raised_here(traceback: types.TracebackType | None) -> bool:
    """Whether the innermost frame belongs to this package."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = traceback.tb_frame.f_globals.get("__name__", "") if traceback is not None else ""
    return name.split(".")[0] == __name__.split(".")[0]


@contextmanager
def open_config(cfg: FairseqDataclass) -> Iterator[FairseqDataclass]:
    """Allow adding fields to ``cfg``. A Namespace (command line) always allows it; a DictConfig (Hydra) is opened."""
    if not OmegaConf.is_config(cfg):
        yield cfg
        return
    OmegaConf.set_struct(cfg, False)
    try:
        yield cfg
    finally:
        OmegaConf.set_struct(cfg, True)


# Warnings about fairseq's calls, which users cannot change: how the message begins, its category, and how the name of
# the module that it is attributed to begins
OLD_CALLS = (
    (r"hydra\.experimental\.\w+\(\) is no longer experimental", UserWarning, "hydra"),
    (r"\s*The version_base parameter is not specified", UserWarning, "hydra"),
    (r"In 'config': Usage of deprecated keyword in package header", UserWarning, "hydra"),
    (r"\s*'config' is validated against ConfigStore schema", UserWarning, ""),  # attributed to the program
    (r"\s*The strict flag in the compose API is deprecated", UserWarning, "hydra"),
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", FutureWarning, "fairseq"),
    (r"'pin_memory' argument is set as true but no accelerator is found", UserWarning, "torch"),
)


def _is_no_missing_bias(record: logging.LogRecord) -> bool:
    """False for the trainer's message that reports biases that do not exist as a shared parameter."""
    text = str(record.msg)
    return not (text.startswith("detected shared parameter") and text.endswith(".bias"))
