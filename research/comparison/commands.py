"""Run each command once, and record its cost."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mlsm_plugin.core.files.atomic_files import read_json, sha256_of_files, write_json
from mlsm_plugin.core.files.output_lock import only_writer

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PLUGIN = REPOSITORY / "mlsm_plugin"


@dataclass(frozen=True)
class Finished:
    """The cost of a command.

    Attributes:
        seconds: as if nothing else ran: on a CPU, the processor time of its threads divided by their number; with a
            GPU, the elapsed time.
        peak_bytes: peak memory.
    """

    seconds: float
    peak_bytes: int


class Commands:
    """Runs commands, except those that ``steps`` already records with the same words and inputs.

    Args:
        output: folder for ``steps`` and ``logs``.
        threads: of each command.
    """

    def __init__(self, output: Path, threads: int) -> None:
        self.output = output
        self.threads = threads
        (output / "steps").mkdir(parents=True, exist_ok=True)

    def log_of(self, name: str) -> Path:
        """Where the output of a command goes."""
        return self.output / "logs" / f"{name}.log"

    def run(
        self, name: str, words: Sequence[object], *, inputs: Sequence[object] = (), made: Path | None = None
    ) -> Finished:
        """Run a command of this package, of fairseq, or a script.

        Args:
            name: of its record and its log.
            words: of the command; a record with another number of ``--threads`` is also used.
            inputs: files whose contents belong to the record.
            made: the folder that the command makes, if its cost is reported. The files of a stopped command are
                removed first, since a resumed command would seem to cost less.

        Raises:
            SystemExit: the command failed (the message holds its last line), or another process writes to ``made``.
        """
        command = [str(word) for word in words]
        record = self.output / "steps" / f"{name}.json"
        signature = {"command": command, "inputs": sha256_of_files(*(str(path) for path in inputs))}
        if record.exists():
            known = read_json(record)
            if _without_threads(known["signature"]) == _without_threads(signature):
                return Finished(known["seconds"], known["peak_bytes"])
        elif made is not None and made.exists():
            _remove(made)
        finished = self._run(command, self.log_of(name), name)
        write_json(record, {"signature": signature, "seconds": finished.seconds, "peak_bytes": finished.peak_bytes})
        return finished

    def _run(self, command: list[str], log: Path, name: str) -> Finished:
        start_of = {"mlsm": ["-m", "mlsm_plugin.cli.main"], "fairseq-train": ["-m", "fairseq_cli.train"]}
        begin = start_of.get(command[0], [command[0]])
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        log.parent.mkdir(exist_ok=True)
        start = time.perf_counter()
        with open(log, "a", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, *begin, *command[1:]], stdout=file, stderr=subprocess.STDOUT, env=environment
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = printed[-1] if printed else "it printed nothing"
            raise SystemExit(f"{name} failed ({log}): {last}\n  {shlex.join(command)}")
        passed = time.perf_counter() - start
        used = usage.ru_utime + usage.ru_stime
        seconds = passed if torch.cuda.is_available() else used / self.threads
        return Finished(seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def _without_threads(signature: dict[str, Any]) -> dict[str, Any]:
    words = signature["command"]
    return {**signature, "command": [word for before, word in pairwise(["", *words]) if before != "--threads"]}


def _remove(folder: Path) -> None:
    try:
        with only_writer(folder):
            shutil.rmtree(folder)
    except ValueError as error:
        raise SystemExit(str(error)) from None
