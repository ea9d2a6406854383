"""Checkpoints are whole or absent, and the newest whole one is found; tests/attacks kills real runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import read_contents
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST, check_same_batches, newest_whole, repair_last
from tests.fairseq_plugin.compat.compat_checks import saved_checkpoint
from tests.runs.training_runs import command_of, environment
from tests.tiny_models import TinyData


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_checkpoint(str(tmp_path_factory.mktemp("saved")))


def with_updates(saved: Path, path: Path, updates: int) -> Path:
    state = torch.load(saved, weights_only=True)
    state["optimizer_history"][-1]["num_updates"] = updates
    checkpoint_utils.torch_persistent_save(state, str(path))
    return path


def test_a_full_disk_leaves_the_old_checkpoint(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_updates(saved, tmp_path / LAST, 5)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"checkpoint_last.pt cannot be written .*No space left.*run the same command again"
    ):
        with_updates(saved, path, 6)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [LAST]


def test_a_copy_is_a_second_name(saved: Path, tmp_path: Path) -> None:
    source, target = with_updates(saved, tmp_path / "checkpoint_1_5.pt", 5), tmp_path / LAST
    target.write_text("old")
    for _ in range(2):  # the second time both names are of the same file already
        assert PathManager.copy(str(source), str(target), overwrite=True)
        assert target.samefile(source)
    with_updates(saved, source, 6)  # does not change the other one
    assert read_contents(target)["optimizer_history"][-1]["num_updates"] == 5
    assert sorted(os.listdir(tmp_path)) == [source.name, LAST]


def test_the_newest_whole_checkpoint_takes_the_place_of_a_damaged_one(saved: Path, tmp_path: Path) -> None:
    assert newest_whole(tmp_path) is None
    repair_last(tmp_path / LAST)  # nothing is there
    for updates in (5, 15, 10):
        with_updates(saved, tmp_path / f"checkpoint_1_{updates}.pt", updates)
    damaged = with_updates(saved, tmp_path / LAST, 20)
    repair_last(damaged)
    assert newest_whole(tmp_path) == (damaged, 20)
    content = damaged.read_bytes()
    for size in (0, 100, len(content) * 58 // 100, len(content) - 1):
        damaged.unlink()
        damaged.write_bytes(content[:size])
        repair_last(damaged)
        assert newest_whole(tmp_path) == (damaged, 15)
        assert (tmp_path / f"{LAST}.damaged").stat().st_size == size


def test_without_a_whole_checkpoint_the_error_says_what_to_do(tmp_path: Path) -> None:
    for name in (LAST, "checkpoint_best.pt"):
        (tmp_path / name).write_bytes(b"half")
    with pytest.raises(ValueError, match="has no other one; delete it to start anew"):
        repair_last(tmp_path / LAST)
    assert (tmp_path / LAST).read_bytes() == b"half"


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [("noise_density", 0.15, 0.5), ("group_size", 16, 4), ("shorten_method", "none", "truncate"), ("rotate", 0.0, 0.5)],
)
def test_other_samples_within_an_epoch_are_refused(name: str, before: object, now: object) -> None:
    place = {"iterations_in_epoch": 3}
    contents = {"extra_state": {"train_iterator": place}, "cfg": {"task": {name: before}}}
    cfg: Any = {"common": {}, "dataset": {}, "optimization": {}, "task": {name: before}}
    check_same_batches(contents, cfg)
    cfg["task"][name] = now
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {now}, but the run was stopped within an"):
        check_same_batches(contents, cfg)
    contents["cfg"]["task"][name] = None  # of a version that did not have it
    check_same_batches(contents, cfg)
    place["iterations_in_epoch"] = 0  # at the end of an epoch
    check_same_batches(contents, cfg)


@pytest.mark.parametrize(("before", "advice"), [(True, "pass --rotate, or"), (False, "leave --rotate out, or")])
def test_the_advice_for_a_switch_can_be_followed(before: bool, advice: str) -> None:
    place = {"extra_state": {"train_iterator": {"iterations_in_epoch": 3}}}
    cfg: Any = {"common": {}, "dataset": {}, "optimization": {}, "task": {"rotate": not before}}
    with pytest.raises(ValueError, match=advice):
        check_same_batches({**place, "cfg": {"task": {"rotate": before}}}, cfg)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_a_run_that_was_stopped_within_an_epoch_keeps_its_batches(tiny: TinyData, tmp_path: Path) -> None:
    def run(updates: int, *flags: object, data: Path = tiny.data_bin) -> subprocess.CompletedProcess[str]:
        common = ("--max-update", updates, "--save-interval-updates", 1, "--disable-validation", *flags)
        command = command_of(data, tmp_path, "--task", "plain_masked_lm", "--criterion", "masked_lm", *common)
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)

    assert run(3, "--batch-size", 4).returncode == 0
    before = (tmp_path / LAST).read_bytes()
    for size in (16, 2):
        stopped = run(5, "--batch-size", size)
        assert stopped.returncode != 0
        said = f"--batch-size is {size}, but the run was stopped within an epoch with 4, so its place in the"
        assert said in stopped.stderr.splitlines()[-1]
        assert "Traceback" not in stopped.stderr
    stopped = run(5, "--batch-size", 4, "--seed", 2)
    assert "--seed is 2, but the run was stopped within an epoch with 1" in stopped.stderr.splitlines()[-1]
    other = tiny.copy(tmp_path / "other")
    ids = np.memmap(other / "train.bin", np.uint16, mode="r+")
    ids[:20] = ids[:20][::-1]
    ids.flush()
    stopped = run(5, "--batch-size", 4, data=other)
    assert f"the text of {other} is not that of the run" in stopped.stderr.splitlines()[-1]
    assert (tmp_path / LAST).read_bytes() == before
    assert run(4, "--batch-size", 4).returncode == 0
    assert run(6, "--batch-size", 2, "--reset-dataloader").returncode == 0
    assert newest_whole(tmp_path) == (tmp_path / LAST, 6)
