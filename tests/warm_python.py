"""A folder of commands that start at once: ``python``, ``mlsm``, ``torchrun`` and those of fairseq.

A process of this project takes seconds to import torch and fairseq, most of the time of a test that starts many. These
commands run in forks of a process that has imported both. They take arguments, environment, working folder and files
from the caller, as a started process does, and pass ``sys.executable`` on, so that what they start is as fast. They
cost the caller no processor time. One that is killed ends a moment later, and with it all that it has started. The
tests of installation, of imports and of commands whose parent alone is killed start real ones, and so does `make docs`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

import pytest

from tests.fairseq_process import STATUS_LOCK, become, fork_server

PARENT = "MLSM_PARENT_PROCESS"  # that of child_process, which this must not import
REAL_PYTHON = Path(sys.executable)  # its folder has the installed commands

# -S: it starts without the packages of the environment
CLIENT = """#!{real} -IS
import json, os, signal, socket, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
folder = {folder!r}
if name == "python":
    if not words or (words[0].startswith("-") and words[0] not in ("-", "-c", "-m", "-u")):
        os.execv({real!r}, [{real!r}, *words])
else:
    words = [os.path.join(os.path.dirname({real!r}), name), *words]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(folder + "/socket")
    request = json.dumps([words, dict(os.environ), os.getcwd()]).encode() + b"\\n"
    socket.send_fds(server, [b"\\n"], [0, 1, 2])
    server.sendall(request)
    status = int(server.recv(16) or b"-9")
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@pytest.fixture(scope="session")
def warm_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the commands."""
    folder = tmp_path_factory.mktemp("bin")
    client = CLIENT.format(real=str(REAL_PYTHON), folder=str(folder))
    for name in ("python", *(path.name for path in REAL_PYTHON.parent.glob("fairseq-*")), "mlsm", "torchrun"):
        (folder / name).write_text(client, encoding="utf-8")
        (folder / name).chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    server = fork_server().Process(target=_serve, args=(listener, str(folder / "python")))
    with STATUS_LOCK:
        server.start()
    yield folder
    server.terminate()
    server.join()


@pytest.fixture
def warm_python(warm_commands: Path) -> Iterator[Path]:
    """What a test starts by ``sys.executable`` or by name starts at once."""
    yield from _used(warm_commands)


@pytest.fixture(scope="module")
def warm_python_in_module(warm_commands: Path) -> Iterator[Path]:
    """The same for all tests of a file, and for what they share."""
    yield from _used(warm_commands)


def _used(folder: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(folder / "python"))
        patch.setenv("PATH", os.pathsep.join((str(folder), str(REAL_PYTHON.parent), os.environ["PATH"])))
        yield folder / "python"


def _serve(listener: socket.socket, executable: str) -> None:
    parent = parent_process()
    assert parent is not None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    while listener in wait([listener, parent.sentinel]):
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _answer(connection, executable)
        connection.close()


def _answer(connection: socket.socket, executable: str) -> NoReturn:
    """Start what the client asks for; tell its exit status. It ends if the client does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as request:
        words, environment, cwd = json.loads(request.readline())
    process = os.fork()
    if process == 0:
        connection.close()
        os.setsid()
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.environ.pop(PARENT, None)  # it ends with the client
        os.chdir(cwd)
        sys.executable = executable
        become(words)
    for file in files:
        os.close(file)
    if connection in wait([connection, os.pidfd_open(process)]):  # the client is gone
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)
