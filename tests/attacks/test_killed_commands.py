"""Commands that train in a child process: killed, they leave no child, and then end as if they were never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.commands import SMALL
from tests.attacks.killed_runs import assert_equal, state_of
from tests.conftest import REPOSITORY, TINY_MODEL, TINY_TRAINING
from tests.tiny_models import TinyData

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
    )


def finetune(tiny: TinyData, output: Path) -> tuple[object, ...]:
    labelled = output.parent / "labelled.tsv"
    lines = tiny.text.read_text(encoding="utf-8").splitlines()[:96]
    labelled.write_text("".join(f"{'ab'[len(line) % 2]}\t{line}\n" for line in lines if line.strip()), encoding="utf-8")
    files = ("--train", labelled, "--valid", labelled)
    options = ("--max-epoch", 3, "--seeds", 1, 2, "--cpu", "--num-workers", 0)
    return ("finetune", "--checkpoint", tiny.model, *files, "--output", output, *options)


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


def start(words: tuple[object, ...], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def children_of(session: int) -> list[int]:
    """Processes of a session that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(own) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", CHAINS)
def test_killed_commands_end_as_if_never_stopped(command: str, tiny: TinyData, tmp_path: Path) -> None:
    words_of, result_of = CHAINS[command]
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    begin = time.monotonic()
    whole = start(words_of(tiny, tmp_path / "whole" / "out"), tmp_path / "whole.log")
    assert whole.wait() == 0, (tmp_path / "whole.log").read_text()[-2000:]
    seconds = time.monotonic() - begin
    rng = random.Random(command)
    for _ in range(int(os.environ.get("MLSM_KILLS", "6"))):
        process = start(words_of(tiny, tmp_path / "killed" / "out"), tmp_path / "killed.log")
        try:
            assert process.wait(rng.uniform(2, seconds)) == 0, (tmp_path / "killed.log").read_text()[-2000:]
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)  # the parent alone
            process.wait()
            deadline = time.monotonic() + 10
            while children_of(process.pid):
                assert time.monotonic() < deadline, "a child outlives its parent"
                time.sleep(0.1)
    last = start(words_of(tiny, tmp_path / "killed" / "out"), tmp_path / "killed.log")
    assert last.wait() == 0, (tmp_path / "killed.log").read_text()[-2000:]
    assert_equal(result_of(tmp_path / "killed" / "out"), result_of(tmp_path / "whole" / "out"))
    assert not [path for path in (tmp_path / "killed").rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.slow
@pytest.mark.parametrize("command", CHAINS)
def test_the_second_of_two_at_once_is_refused(command: str, tiny: TinyData, tmp_path: Path) -> None:
    words_of, result_of = CHAINS[command]
    for name in ("whole", "both"):
        (tmp_path / name).mkdir()
    assert start(words_of(tiny, tmp_path / "whole" / "out"), tmp_path / "whole.log").wait() == 0
    words = words_of(tiny, tmp_path / "both" / "out")
    both = [start(words, tmp_path / f"both{number}.log") for number in range(2)]
    statuses = [process.wait() for process in both]
    logs = [(tmp_path / f"both{number}.log").read_text() for number in range(2)]
    assert 0 in statuses, logs
    for status, log in zip(statuses, logs, strict=True):
        assert status == 0 or "another process is writing to" in log, log[-2000:]
        assert "Traceback" not in log
    assert_equal(result_of(tmp_path / "both" / "out"), result_of(tmp_path / "whole" / "out"))
