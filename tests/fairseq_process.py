"""Run fairseq-train in forks of a process that has already imported torch and fairseq, which saves time."""

# imports nothing of this package: --user-dir does, in each process
from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = ["torch", "fairseq_cli.train", "scipy.stats", "numba", "sentencepiece", "spams", "transformers"]
LARGEST_FILE = "TEST_LARGEST_FILE"  # in the environment: bytes
COMMAND = (sys.executable, "-m", "fairseq_cli.train")

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
    process.start()
    return process


def run_fairseq_train(
    arguments: list[str], *, environment: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``python -m fairseq_cli.train arguments`` does, with its output; the exit status is not looked at."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = (Path(folder, "stdout"), Path(folder, "stderr"))
        process = start_fairseq_train(arguments, environment=environment, outputs=outputs, cwd=cwd)
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
    if LARGEST_FILE in environment:  # a longer one is as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(environment[LARGEST_FILE]), resource.RLIM_INFINITY))
    import torch
    from fairseq_cli import train

    sys.argv, sys.modules["__main__"] = [str(train.__file__), *arguments], train
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        train.cli_main()
    except Exception as error:  # as the interpreter does, which multiprocessing does not
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # of a forked process nobody else runs them
