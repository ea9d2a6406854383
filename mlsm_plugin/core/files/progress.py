"""Progress of long work: a bar on a terminal or in a notebook, and occasional lines in a log file."""

import io
import sys
import threading
import weakref
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 20.0
LINE = "{desc}: {n_fmt} {unit}, {elapsed} so far"
LINE_WITH_TOTAL = "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt} {unit}, {elapsed} so far, {remaining} left"


class Progress(tqdm):
    """A tqdm bar; if stderr is not a terminal, a line every 20 seconds instead (none for shorter work).

    A line is written even while there is no progress, so that a log shows which part of the work is slow.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._over = threading.Event()
        lines = not (sys.stderr.isatty() or "ipykernel" in sys.modules)
        if lines:
            options = {"file": _Nowhere(), "desc": "progress", **options}
        super().__init__(*arguments, **options)
        if lines and not self.disable:
            self.bar_format = LINE_WITH_TOTAL if self.total else LINE
            threading.Thread(target=_write_lines, args=(weakref.ref(self), self._over), daemon=True).start()

    def close(self) -> None:
        """End the bar, as tqdm does."""
        self._over.set()
        super().close()


class _Nowhere(io.TextIOBase):
    """A file that discards the bar that tqdm writes."""

    def write(self, text: str) -> int:
        return len(text)


def _write_lines(bar: weakref.ref[Progress], over: threading.Event) -> None:
    while not over.wait(SECONDS_BETWEEN_LINES) and (current := bar()) is not None:
        print(current, file=sys.stderr, flush=True)
        del current
