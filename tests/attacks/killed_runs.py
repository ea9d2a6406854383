"""Kill fairseq-train at random moments and start it again, until it ends by itself."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.conftest import CRITERIONS, PLUGIN, REPOSITORY, TINY_MODEL, TINY_TRAINING
from tests.fairseq_process import start_fairseq_train

# epochs of a few updates, and a checkpoint every third update
SAVED_EVERY = 3
FLAGS = (
    *("--no-epoch-checkpoints", "--save-interval-updates", SAVED_EVERY, "--keep-interval-updates", 2),
    *("--max-update", 20),
)


def words_of(data: object, save_dir: Path, task: str, *flags: object) -> list[str]:
    """The arguments of fairseq-train for a tiny model."""
    words = [
        *(
            data,
            "--user-dir",
            PLUGIN,
            "--save-dir",
            save_dir,
            "--task",
            task,
            "--criterion",
            CRITERIONS.get(task, task),
        ),
        *(*TINY_MODEL, *TINY_TRAINING, *FLAGS, *flags),
    ]
    return [str(word) for word in words]


def start(words: list[str], log: Path, **more: str) -> BaseProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}
    return start_fairseq_train(words, environment=environment, outputs=(log, log))


def seconds_of(words: list[str], log: Path) -> float:
    """How long a run takes that is left alone; it must succeed."""
    begin = time.monotonic()
    process = start(words, log)
    process.join()
    assert process.exitcode == 0, log.read_text()[-3000:]
    return time.monotonic() - begin


def run_with_kills(words: list[str], log: Path, kills: int, rng: random.Random) -> int:
    """Start the run and kill it ``kills`` times: early, or soon after one of the next updates. Then let it end.

    Returns the number of kills that met a running process.
    """
    hit = update = 0
    for number in range(kills):
        own = log.with_name(f"{log.name}.{number}")
        process = start(words, own)
        if rng.random() < 0.2:
            process.join(rng.uniform(0, 3))
        else:
            wanted = update + rng.randint(1, 5)
            while process.exitcode is None and last_update(own) < wanted:
                process.join(0.01)
            process.join(rng.uniform(0, 0.3))  # while it validates, saves or trains
        if process.exitcode is None:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            hit += 1
        process.join()
        update = max(update, last_update(own) // SAVED_EVERY * SAVED_EVERY)
    seconds_of(words, log)
    return hit


def last_update(log: Path) -> int:
    """The last update that a log names; 0 if there is none."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return max(map(int, re.findall(r"num_updates=(\d+)", text)), default=0)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """What must be the same: weights, optimizer and updates; times differ."""
    state = torch.load(checkpoint, weights_only=True)
    return {
        "model": state["model"],
        "optimizer": state["last_optimizer_state"],
        "updates": state["optimizer_history"][-1]["num_updates"],
        "iterator": {key: state["extra_state"]["train_iterator"][key] for key in ("epoch", "iterations_in_epoch")},
    }


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_equal(found[number], value, f"{where}[{number}]")
    else:
        assert found == wanted, where
