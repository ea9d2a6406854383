"""Commands that train in a child process, killed or on a full disk, then end as if they were never stopped.

A killed one leaves no child behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.commands import SMALL
from tests.attacks.killed_runs import assert_equal, state_of
from tests.conftest import REPOSITORY, TINY_MODEL, TINY_TRAINING
from tests.fairseq_process import LARGEST_FILE
from tests.tiny_models import TinyData
from tests.warm_python import REAL_PYTHON

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
ALL_FAULTS = float(os.environ.get("MLSM_FAULTS", "1")) == 1
TRAINING = ("--save-interval-updates", 2, "--validate-interval-updates", 4, "--no-progress-bar")


def auxiliary(tiny: TinyData, output: Path) -> tuple[object, ...]:
    return (
        "auxiliary",
        tiny.data_bin,
        "--save-dir",
        output,
        "--max-update",
        12,
        *TINY_MODEL,
        *TINY_TRAINING,
        *TRAINING,
        *("--keep-at", 50, 100),  # two processes, each of which takes seconds to begin
    )


def finetune(tiny: TinyData, output: Path) -> tuple[object, ...]:
    labelled = output.parent / "labelled.tsv"
    lines = tiny.text.read_text(encoding="utf-8").splitlines()[:96]
    labelled.write_text("".join(f"{'ab'[len(line) % 2]}\t{line}\n" for line in lines if line.strip()), encoding="utf-8")
    files = ("--train", labelled, "--valid", labelled)
    options = ("--max-epoch", 3, "--seeds", 1, 2, "--cpu")
    return ("finetune", "--model", tiny.model, *files, "--output", output, *options)


def preprocess(tiny: TinyData, output: Path) -> tuple[object, ...]:
    return (
        *("preprocess", "--train", tiny.text, "--valid", tiny.text, "--output", output, "--vocab-size", 200),
        *("--auxiliary-updates", 8, "--auxiliary-arch", "mlsm_roberta_tiny", "--tokens-per-sample", 64),
        *(*SMALL[:6], "--threads", 1, *TINY_MODEL[2:], *TINY_TRAINING, *TRAINING),
    )


def result_of_auxiliary(output: Path) -> object:
    names = sorted(path.name for path in output.iterdir())
    return names, state_of(output / "checkpoint_last.pt"), state_of(output / "checkpoint_best.pt")


def result_of_finetune(output: Path) -> object:
    return json.loads((output / "results.json").read_text()), (output / "seed-1" / "valid.predictions.tsv").read_text()


def result_of_preprocess(output: Path) -> object:
    made = [*output.glob("dictionary/*"), *output.glob("data-bin/*.codes/*"), *output.glob("data-bin/*.bin")]
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(made)}


CHAINS: dict[str, tuple[Callable[..., tuple[object, ...]], Callable[[Path], object]]] = {
    "auxiliary": (auxiliary, result_of_auxiliary),
    "finetune": (finetune, result_of_finetune),
    "preprocess": (preprocess, result_of_preprocess),
}


def start(words: tuple[object, ...], log: Path, python: Path = REAL_PYTHON) -> subprocess.Popen[bytes]:
    command = command_of(words, python)
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT, start_new_session=True)


def command_of(words: tuple[object, ...], python: Path = REAL_PYTHON) -> list[str]:
    return [str(python), "-m", "mlsm_plugin.cli.main", *map(str, words)]


def on_full_disk(words: tuple[object, ...], largest: int, python: Path) -> subprocess.CompletedProcess[str]:
    """Run a command where no file can be longer than ``largest`` bytes."""
    environment = {**ENVIRONMENT, LARGEST_FILE: str(largest)}
    return subprocess.run(command_of(words, python), capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def whole(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, float]]:
    """A function that gives the output of a command that was left alone, and how long it took in seconds."""

    @cache
    def run(command: str) -> tuple[Path, float]:
        root = tmp_path_factory.mktemp("whole")
        begin = time.monotonic()
        process = start(CHAINS[command][0](tiny, root / "out"), root.with_suffix(".log"))
        assert process.wait() == 0, root.with_suffix(".log").read_text()[-2000:]
        return root / "out", time.monotonic() - begin

    return run


def children_of(session: int) -> list[int]:
    """Threads of a session that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/task/*/stat"):
        try:
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(own) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def check_result(command: str, output: Path, wanted: Path) -> None:
    """Equal to that of a command that was left alone, with nothing left over."""
    result_of = CHAINS[command][1]
    assert_equal(result_of(output), result_of(wanted))
    assert not [path for path in output.parent.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.slow
@pytest.mark.parametrize("command", CHAINS)
def test_killed_commands_end_as_if_never_stopped(
    command: str, tiny: TinyData, whole: Any, tmp_path: Path, warm_commands: Path
) -> None:
    wanted, seconds = whole(command)
    output, log = tmp_path / "killed" / "out", tmp_path / "killed.log"
    output.parent.mkdir()
    words = CHAINS[command][0](tiny, output)
    rng = random.Random(command)
    for _ in range(int(os.environ.get("MLSM_KILLS", "6"))):
        process = start(words, log)
        try:
            assert process.wait(rng.uniform(2, seconds)) == 0, log.read_text()[-2000:]
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)  # the parent alone
            process.wait()
            # a child looks for its parent once it has imported this package, which takes seconds on a busy machine
            deadline = time.monotonic() + 60
            while children_of(process.pid):
                assert time.monotonic() < deadline, "a child outlives its parent"
                time.sleep(0.1)
    last = start(words, log, warm_commands / "python")
    assert last.wait() == 0, log.read_text()[-2000:]
    check_result(command, output, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("command", CHAINS)
@pytest.mark.parametrize("share", (0.001, 0.05, 0.6, 0.95) if ALL_FAULTS else (0.6,))
def test_a_full_disk_is_one_line(
    command: str, share: float, tiny: TinyData, whole: Any, tmp_path: Path, warm_python: Path
) -> None:
    wanted, _ = whole(command)
    output = tmp_path / "full" / "out"
    output.parent.mkdir()
    words = CHAINS[command][0](tiny, output)
    largest = max(path.stat().st_size for path in wanted.rglob("*") if path.is_file())
    full = on_full_disk(words, int(share * largest), warm_python)
    assert full.returncode == 1, full.stderr[-3000:]
    assert full.stderr.count("mlsm: error: ") == 1, full.stderr[-3000:]
    assert "Traceback" not in full.stdout + full.stderr
    log = tmp_path / "full.log"
    assert start(words, log, warm_python).wait() == 0, log.read_text()[-2000:]
    check_result(command, output, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("command", CHAINS)
def test_the_second_of_two_at_once_is_refused(
    command: str, tiny: TinyData, whole: Any, tmp_path: Path, warm_python: Path
) -> None:
    wanted, _ = whole(command)
    output = tmp_path / "both" / "out"
    output.parent.mkdir()
    words = CHAINS[command][0](tiny, output)
    both = [start(words, tmp_path / f"both{number}.log", warm_python) for number in range(2)]
    statuses = [process.wait() for process in both]
    logs = [(tmp_path / f"both{number}.log").read_text() for number in range(2)]
    assert 0 in statuses, logs
    for status, log in zip(statuses, logs, strict=True):
        assert status == 0 or "another process is writing to" in log, log[-2000:]
        assert "Traceback" not in log
    check_result(command, output, wanted)
