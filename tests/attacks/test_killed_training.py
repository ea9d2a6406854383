"""A run of fairseq-train that is killed again and again ends with the weights of a run that was never stopped."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import pytest

from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from tests.attacks.killed_runs import assert_equal, run_with_kills, seconds_of, start, state_of, words_of
from tests.conftest import Pipeline
from tests.denoising_flags import SIZE
from tests.fairseq_process import LARGEST_FILE

KILLS = int(os.environ.get("MLSM_KILLS", "20"))
UPDATES = max(15, 3 * KILLS)  # a kill comes some three updates after the last one
# dropout, so that the random numbers of a resumed run matter
OBJECTIVES: dict[str, tuple[object, ...]] = {
    "plain_masked_lm": ("--dropout", 0.1),
    "masked_latent_semantic": ("--dropout", 0.1),
    "taco": ("--dropout", 0.1),
    "nonparametric_masked_lm": ("--dropout", 0.1, "--batch-size", 8),
    "span_denoising": (*SIZE, "--sample-break-mode", "none", "--dropout", 0.1, "--tokens-per-sample", 48),
    "state_regression": ("--dropout", 0.1, "--auxiliary-checkpoint", "AUXILIARY"),
    "sentence_vectors": ("--dropout", 0.1, "--auxiliary-checkpoint", "AUXILIARY", "--encoder-embed-dim", 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", OBJECTIVES)
def test_killed_runs_end_as_one_that_was_never_stopped(pipeline: Pipeline, tmp_path: Path, task: str) -> None:
    more = ("--skip-invalid-size-inputs-valid-test", "--batch-size", 64, "--max-update", UPDATES, *OBJECTIVES[task])
    more = tuple(pipeline.auxiliary if word == "AUXILIARY" else word for word in more)
    whole, killed = (words_of(pipeline.data_bin, tmp_path / name, task, *more) for name in ("whole", "killed"))
    seconds_of(whole, tmp_path / "whole.log")
    assert run_with_kills(killed, tmp_path / "killed.log", KILLS, random.Random(task)) >= max(1, KILLS * 3 // 4)
    assert_equal(state_of(tmp_path / "killed" / LAST), state_of(tmp_path / "whole" / LAST))
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )


@pytest.mark.slow
def test_a_finished_run_is_not_trained_and_a_damaged_checkpoint_not_used(pipeline: Pipeline, tmp_path: Path) -> None:
    words = words_of(pipeline.data_bin, tmp_path / "run", "plain_masked_lm", "--max-update", 8)
    seconds_of(words, tmp_path / "first.log")
    last = tmp_path / "run" / LAST
    before = last.read_bytes()
    wanted = state_of(last)
    seconds_of(words, tmp_path / "again.log")
    assert last.read_bytes() == before
    assert "this run is finished after 8 updates" in (tmp_path / "again.log").read_text()
    last.unlink()  # not a second name of another one any more
    last.write_bytes(before[: len(before) * 58 // 100])
    for damaged in (tmp_path / "run").glob("checkpoint_best.pt"):
        damaged.unlink()
        damaged.write_bytes(b"")
    seconds_of(words, tmp_path / "repaired.log")
    said = (tmp_path / "repaired.log").read_text()
    assert "checkpoint_last.pt is damaged, it is now checkpoint_last.pt.damaged; resuming from" in said
    assert "update 6" in said
    assert_equal(state_of(last), wanted)


@pytest.mark.slow
def test_early_stops_survive_a_restart(pipeline: Pipeline, tmp_path: Path) -> None:
    """Without a better result for two validations a run ends; a restart does not begin to count anew."""
    flags = ("--patience", 2, "--lr", 0, "--save-interval-updates", 2, "--max-update", 30)
    words = words_of(pipeline.data_bin, tmp_path / "whole", "plain_masked_lm", *flags)
    seconds_of(words, tmp_path / "whole.log")
    wanted = state_of(tmp_path / "whole" / LAST)
    assert wanted["updates"] == 6
    parts = words_of(pipeline.data_bin, tmp_path / "parts", "plain_masked_lm", *flags)
    for updates in (2, 4, 30, 30):
        seconds_of([*parts, "--max-update", str(updates)], tmp_path / f"{updates}.log")
    assert_equal(state_of(tmp_path / "parts" / LAST), wanted)
    assert "this run is finished after 6 updates" in (tmp_path / "30.log").read_text()
    shutil.rmtree(tmp_path / "parts")


@pytest.mark.slow
def test_a_full_disk_leaves_whole_checkpoints_and_the_run_resumes(pipeline: Pipeline, tmp_path: Path) -> None:
    words, cut = (words_of(pipeline.data_bin, tmp_path / name, "plain_masked_lm") for name in ("whole", "cut"))
    seconds_of(words, tmp_path / "whole.log")
    seconds_of([*cut, "--max-update", "8"], tmp_path / "begin.log")
    before = {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()}
    size = (tmp_path / "cut" / LAST).stat().st_size
    process = start(cut, tmp_path / "full.log", **{LARGEST_FILE: str(size * 58 // 100)})
    process.join()
    said = (tmp_path / "full.log").read_text()
    assert process.exitcode == 1
    assert "Traceback" not in said
    assert re.search(r"error: .*checkpoint_1_9.pt cannot be written .*run the same command again to resume", said)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()} == before
    seconds_of(cut, tmp_path / "again.log")
    assert_equal(state_of(tmp_path / "cut" / LAST), state_of(tmp_path / "whole" / LAST))
