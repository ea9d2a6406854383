"""Child processes that end with their parent, however that ends: a killed command leaves no training behind.

The parent names itself in the environment of the child. The child watches it; see :func:`end_with_parent`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

PARENT = "MLSM_PARENT_PROCESS"
SECONDS_BETWEEN_LOOKS = 0.2


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command that imports this package; arguments are those of ``subprocess.Popen``."""
    return subprocess.Popen(list(command), env={**os.environ, PARENT: str(os.getpid())}, **options)


def run_child(command: Sequence[str]) -> int:
    """Run a command that imports this package, and wait for it; returns its exit status."""
    with start_child(command) as process:
        return process.wait()


def end_with_parent() -> None:
    """Kill this process when the parent that :func:`start_child` named has ended; without one, do nothing.

    A process that this one starts does not inherit it: it must not take the grandparent for its parent.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        threading.Thread(target=_watch, args=(int(parent),), name="watch-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGKILL)
