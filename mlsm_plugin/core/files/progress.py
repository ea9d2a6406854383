"""Progress of long work: a bar on a terminal or in a notebook, and occasional lines in a log file."""

import io
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 20.0
SECONDS_BETWEEN_TIMES = 1.0  # of :func:`elapsed_time` on a terminal
USUAL_COLUMNS = 80  # of a terminal that does not tell its size
USUAL_ROWS = 24
NOTEBOOK_STREAM = "ipykernel.iostream"  # the module of stderr in a notebook
LINE = "{desc}: {n_fmt} {unit}, {elapsed} so far"
ELAPSED = "{desc}: {elapsed} so far"
LINE_WITH_TOTAL = "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt} {unit}, {elapsed} so far, {remaining} left"


class Progress(tqdm):
    """A tqdm bar; if stderr is not a terminal, a line every 20 seconds instead (none for shorter work).

    A line is written even while there is no progress, so that a log shows which part of the work is slow. The time left
    follows from the mean speed so far, since work in bursts, such as the training of an SAE, has no other.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._over = threading.Event()
        options = {"smoothing": 0.0, **options}
        lines = not (sys.stderr.isatty() or type(sys.stderr).__module__ == NOTEBOOK_STREAM)
        if lines:
            options = {"file": _Nowhere(), "desc": "progress", **options}
        elif _has_no_size():
            options = {"ncols": USUAL_COLUMNS, "nrows": USUAL_ROWS, **options}
        super().__init__(*arguments, **options)
        if self.disable:
            return
        _shown.add(self)
        if lines:
            self.bar_format = options.get("bar_format") or (LINE_WITH_TOTAL if self.total else LINE)
            threading.Thread(target=_write_lines, args=(weakref.ref(self), self._over), daemon=True).start()

    def close(self) -> None:
        """End the bar, as tqdm does."""
        self._over.set()
        _shown.discard(self)
        super().close()


class _Nowhere(io.TextIOBase):
    """A file that discards the bar that tqdm writes."""

    def write(self, text: str) -> int:
        return len(text)


class _OtherProcess:
    """A process that shows its own progress."""


# the bars that are not closed, and processes that have their own
_shown: weakref.WeakSet[Progress | _OtherProcess] = weakref.WeakSet()


def close_bars() -> None:
    """End the bars that an error left open, so that its message has a line of its own."""
    bars = [bar for bar in _shown if isinstance(bar, Progress)]
    for bar in sorted(bars, key=lambda bar: abs(bar.pos), reverse=True):  # the lowest on the screen first
        bar.close()


@contextmanager
def still_running(what: str) -> Iterator[None]:
    """Write a line every 20 seconds while a block of code runs, unless a bar shows its progress."""
    over = threading.Event()
    threading.Thread(target=_write_that_it_runs, args=(what, over, time.monotonic()), daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def elapsed_time(what: str) -> Iterator[None]:
    """Show for how long a block of code runs that tells no progress, but lets other threads run."""
    over = threading.Event()
    with Progress(desc=what, leave=False, bar_format=ELAPSED) as bar:
        clock = threading.Thread(target=_refresh, args=(bar, over), daemon=True)
        clock.start()
        try:
            yield
        finally:
            over.set()
            clock.join()


@contextmanager
def shown_by_another_process() -> Iterator[None]:
    """Write no line of :func:`still_running` while a block of code waits for a process that shows its progress."""
    process = _OtherProcess()
    _shown.add(process)
    try:
        yield
    finally:
        _shown.discard(process)


def _has_no_size() -> bool:
    """Whether stderr is a terminal that does not tell its size, on which tqdm would show nothing."""
    try:
        return 0 in os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # no terminal of the system, such as one of a test
        return False


def _write_lines(bar: weakref.ref[Progress], over: threading.Event) -> None:
    while not over.wait(SECONDS_BETWEEN_LINES) and (current := bar()) is not None:
        _write_line(str(current))
        del current


def _refresh(bar: Progress, over: threading.Event) -> None:
    while not over.wait(SECONDS_BETWEEN_TIMES):
        bar.refresh()


def _write_that_it_runs(what: str, over: threading.Event, start: float) -> None:
    while not over.wait(SECONDS_BETWEEN_LINES):
        if not len(_shown):
            elapsed = tqdm.format_interval(time.monotonic() - start)
            _write_line(f"{what}: {elapsed} so far")


def _write_line(text: str) -> None:
    """Write a line at once, since print would let another thread write before its end."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
