"""Run an ``mlsm`` command in a process of its own, and let one of its file operations fail, or kill it there."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fairseq_process import fork_server

# audit events of operations that change the disk, each with the number of its argument that is the path changed
CHANGES = {
    "os.rename": 1,
    "os.link": 1,
    "os.mkdir": 0,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.truncate": 0,
    "os.symlink": 1,
}
FREES_ROOM = ("os.remove", "os.rmdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Fault:
    """What goes wrong: ``kill`` or ``full`` (the disk) before operation ``at``, or files of at most ``bytes``."""

    kind: str = "none"
    at: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """Exit status (negative: a signal), what was printed, and the number of operations that changed the disk."""

    status: int
    printed: str
    operations: int


def run_command(words: Sequence[object], root: Path, log: Path, fault: Fault = Fault()) -> Outcome:
    """Run ``mlsm words``, counting the operations below ``root``."""
    counter = log.with_suffix(".count")
    for file in (log, counter):
        file.unlink(missing_ok=True)
    os.mkfifo(log)  # a limit of the length of files must not cut what is printed
    arguments = ([str(word) for word in words], str(root), str(log), str(counter), fault)
    process = fork_server().Process(target=_command, args=arguments)
    with ThreadPoolExecutor(1) as pool:
        printed = pool.submit(log.read_bytes)
        process.start()
        process.join()
        with suppress(OSError):  # nobody reads any more
            os.close(os.open(log, os.O_WRONLY | os.O_NONBLOCK))
        text = printed.result().decode(errors="replace")
    assert process.exitcode is not None
    operations = int(counter.read_text()) if counter.exists() else 0
    return Outcome(process.exitcode, text, operations)


class _Operations:
    """Counts the operations that change the disk below ``root``, and lets the wanted one fail."""

    def __init__(self, root: str, fault: Fault) -> None:
        self.root, self.fault, self.number = os.path.realpath(root), fault, 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(args[2], int) and args[2] & WRITING:
                self.seen(event, args[0])
        elif event in CHANGES:
            self.seen(event, args[CHANGES[event]])

    def seen(self, event: str, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        absolute = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
        if os.path.commonpath([absolute, self.root]) != self.root:
            return
        self.number += 1
        if self.number != self.fault.at:
            return
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.kind == "full" and event not in FREES_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(path))


def _command(words: list[str], root: str, log: str, counter: str, fault: Fault) -> None:
    pipe = os.open(log, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(pipe, descriptor)
    os.close(pipe)
    gc.freeze()  # as tests.fairseq_process.become
    from mlsm_plugin.cli.main import main

    operations = _Operations(root, fault)
    fsync = os.fsync

    def counted_fsync(descriptor: int) -> None:
        operations.seen("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = counted_fsync
    sys.addaudithook(operations)
    if fault.kind == "bytes":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.bytes, resource.RLIM_INFINITY))
    status = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    if fault.kind == "none":
        Path(counter).write_text(str(operations.number))
    os._exit(status)
