"""One process at a time writes to a folder, and child processes end with their parents."""

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PathLike = str | os.PathLike[str]  # here, since atomic_files imports numpy
SECONDS_TO_WAIT = 3.0  # for a process that has just been killed
_held: dict[Path, int] = {}


def hold_lock(folder: PathLike) -> bool:
    """Take the lock of a folder, and hold it until this process ends or calls :func:`release_lock`.

    The lock is on the folder itself, so no file is left over. The system releases it when the process ends. ValueError
    if another process holds it. False if this process already held it, or the file system has no locks; else True.
    """
    path = Path(os.path.realpath(folder))
    if path in _held:
        return False
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            os.close(descriptor)
            raise ValueError(
                f"another process is writing to {folder}; wait until it ends, or choose another folder"
            ) from None
        except OSError:
            os.close(descriptor)
            return False
        if not _is_at(descriptor, path):  # the process that held it wrote nothing and removed the folder
            os.close(descriptor)
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY)
            continue
        _held[path] = descriptor
        return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def release_lock(folder: PathLike) -> None:
    """Release the lock of a folder."""
    os.close(_held.pop(Path(os.path.realpath(folder))))


@contextmanager
def only_writer(folder: PathLike) -> Iterator[None]:
    """Call :func:`hold_lock` for the block; a folder created for this is removed again if it stays empty."""
    new = not os.path.exists(folder)
    taken = hold_lock(folder)
    try:
        yield
    finally:
        if new:
            with suppress(OSError):  # it is not empty
                os.rmdir(folder)
        if taken:
            release_lock(folder)


@contextmanager
def in_turn(folder: PathLike) -> Iterator[None]:
    """Wait until no other process holds the lock of a folder, and hold it during the block (if locks exist)."""
    if Path(os.path.realpath(folder)) in _held:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


PARENT = "MLSM_PARENT_PROCESS"
SHOWS_PROGRESS = "MLSM_SHOWS_PROGRESS"  # set in children, which inherit the terminal or the log of their parent
SECONDS_BETWEEN_LOOKS = 0.2


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command that imports this package; arguments are those of ``subprocess.Popen``."""
    variables = {PARENT: str(os.getpid()), SHOWS_PROGRESS: "1"}
    return subprocess.Popen(list(command), env={**os.environ, **variables}, **options)


def run_child(command: Sequence[str]) -> int:
    """Run a command that imports this package, and wait for it; returns its exit status."""
    with start_child(command) as process:
        return process.wait()


def end_with_parent() -> None:
    """Kill this process when the parent named by :func:`start_child` ends; does nothing if no parent was named.

    Children of this process do not inherit the name, since they must not take the grandparent for their parent.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        threading.Thread(target=_watch, args=(int(parent),), name="watch-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGKILL)
