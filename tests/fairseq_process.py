"""Run fairseq-train in forks of a process that has already imported torch and fairseq, which saves time."""

# imports nothing of this package: --user-dir does, in each process
from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

# also what torch, transformers, hydra and numba import only when a model is made or a function compiled
PRELOADED = [
    *("torch", "fairseq_cli.train", "scipy.stats", "numba", "sentencepiece", "spams", "torchaudio", "transformers"),
    *("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "hydra._internal.core_plugins", "matplotlib.figure"),
    "transformers.trainer",
    *(f"transformers.models.auto.{name}_auto" for name in ("modeling", "tokenization")),
    *("transformers.models.modernbert.modeling_modernbert", "faiss"),
    *(f"numba.{name}" for name in ("cpython.setobj", "cpython.unicode", "misc.cffiimpl", "experimental.jitclass.base")),
]
LARGEST_FILE = "TEST_LARGEST_FILE"  # in the environment of a fork: bytes
COMMAND = (sys.executable, "-m", "fairseq_cli.train")

# an exit status can be read once, and each start() reads those of all ended processes, for which other threads may wait
STATUS_LOCK = threading.Lock()

_context: ForkServerContext | None = None


def fork_server() -> ForkServerContext:
    """The only one of this process; it has not imported this package, whose import depends on the program."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOADED)
    return _context


def start_fairseq_train(
    arguments: list[str], *, environment: dict[str, str], outputs: tuple[Path, Path], cwd: Path | None = None
) -> BaseProcess:
    """Start what ``python -m fairseq_cli.train arguments`` does; its standard output and error go to two files."""
    names = [str(path) for path in outputs]
    process = fork_server().Process(target=_train, args=(arguments, environment, str(cwd or Path.cwd()), names))
    with STATUS_LOCK:
        process.start()
    return process


def run_fairseq_train(
    arguments: list[str], *, environment: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``python -m fairseq_cli.train arguments`` does, with its output; the exit status is not looked at."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = (Path(folder, "stdout"), Path(folder, "stderr"))
        process = start_fairseq_train(arguments, environment=environment, outputs=outputs, cwd=cwd)
        wait([process.sentinel])
        with STATUS_LOCK:
            process.join()
        stdout, stderr = (path.read_text(encoding="utf-8", errors="replace") for path in outputs)
    assert process.exitcode is not None
    return subprocess.CompletedProcess([*COMMAND, *arguments], process.exitcode, stdout, stderr)


def _train(arguments: list[str], environment: dict[str, str], cwd: str, outputs: list[str]) -> None:
    for descriptor, name in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    become(["-m", "fairseq_cli.train", *arguments])


def become(words: list[str]) -> NoReturn:
    """In a fork: do what ``python words`` does, with the standard files as they are, and end."""
    gc.freeze()  # what is imported stays, and costs no collection time
    multiprocessing.set_start_method(None, force=True)  # its workers start as usual, not as this process did
    sys.stdin = os.fdopen(0, "r", encoding="utf-8")
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    logging.root.handlers.clear()  # a command of fairseq sets logging up when it is imported
    logging.root.setLevel(logging.WARNING)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fairseq_cli"]:
        del sys.modules[name]
    if largest := os.environ.get(LARGEST_FILE):  # a longer one is as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), resource.RLIM_INFINITY))
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    status: object = 0
    try:
        _run_main(words[1:] if words[0] == "-u" else words)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit((status or 0) & 255)


def _run_main(words: list[str]) -> None:
    first, paths = words[0], os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]
    if first == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif first in ("-", "-c"):
        code = sys.stdin.read() if first == "-" else words[1]
        sys.argv = ["-", *words[1:]] if first == "-" else ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
