"""The stages of ``mlsm pretrain``: where they begin, what they keep, what a rerun does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.files.step_record import StepRecord
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import read_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import save_whole, updates_of
from mlsm_plugin.fairseq_plugin.compat.model_parts import ATOM_PROJECTION
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.pipelines import staged_pretraining
from mlsm_plugin.fairseq_plugin.pipelines.staged_pretraining import (
    Stage,
    begin_stage,
    keep_stages,
    measured,
    restart_head,
    run_stages,
    stages_of,
)
from tests.tiny_models import TinyData, save_untrained


@given(updates=st.integers(1, 10_000), percentages=st.lists(st.integers(1, 99), min_size=1, max_size=5, unique=True))
def test_stages_follow_each_other_and_none_is_empty(updates: int, percentages: list[int]) -> None:
    percentages.sort()
    bounds = [0, *(updates * percentage // 100 for percentage in percentages), updates]
    if len(set(bounds)) < len(bounds):
        with pytest.raises(ValueError, match="a stage has no update"):
            stages_of(Path("run"), updates, percentages)
        return
    stages = stages_of(Path("run"), updates, percentages)
    assert len(stages) == len(percentages) + 1
    assert [stage.number for stage in stages] == list(range(len(stages)))
    assert sum(stage.end - stage.begin for stage in stages) == updates
    assert [stage.end for stage in stages[:-1]] == [stage.begin for stage in stages[1:]]
    assert len({stage.folder for stage in stages}) == len(stages)


@pytest.mark.parametrize(
    ("percentages", "problem"),
    [
        ([], "--stages takes percentages from 1 to 99, got none"),
        ([0], "--stages takes percentages from 1 to 99, got 0"),
        ([20, 100], "--stages takes percentages from 1 to 99, got 20 100"),
        ([60, 20], "with --stages 60 20 and --max-update 1000 a stage has no update"),
        ([20, 20], "with --stages 20 20 and --max-update 1000 a stage has no update"),
    ],
)
def test_stages_that_make_no_sense_are_refused(percentages: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        stages_of(Path("run"), 1000, percentages)


def record_of(save_dir: Path) -> StepRecord:
    return StepRecord(save_dir / "steps.json")


def write_checkpoint(path: Path, updates: int) -> None:
    """A checkpoint without weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_whole({"cfg": {}, "model": {}, "optimizer_history": [{"num_updates": updates}]}, path)


def recording(save_dir: Path, done: list[str], *, fails: str = "") -> dict[str, Callable[[Stage], None]]:
    """Parts that write down what they were asked for; the one named ``fails`` stops."""

    def act(what: str, stage: Stage) -> None:
        done.append(f"{what} {stage.number}")
        if done[-1] == fails:
            raise ValueError("killed")
        if what == "train":
            write_checkpoint(save_dir / LAST, stage.end)

    return {"make_codes": lambda stage: act("codes", stage), "train": lambda stage: act("train", stage)}


def test_every_stage_codes_the_model_at_its_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages, done = stages_of(tmp_path, 100, [20, 60]), []  # type: ignore[var-annotated]
    run_stages(stages, record_of(tmp_path), seed=1, **recording(tmp_path, done))
    assert done == ["train 0", "codes 1", "train 1", "codes 2", "train 2"]
    assert [updates_of(stage.teacher) for stage in stages[1:]] == [20, 60]
    assert updates_of(tmp_path / LAST) == 100
    printed = capsys.readouterr().out
    assert "stage 2 of 3, updates 21 to 60: masked LM and the codes of the model as it is now" in printed
    assert list(read_json(tmp_path / "steps.json")) == [
        *("stage 0: training", "stage 1: codes", "stage 1: training", "stage 2: codes", "stage 2: training")
    ]
    run_stages(stages, record_of(tmp_path), seed=1, **recording(tmp_path, done))
    assert len(done) == 5


@pytest.mark.parametrize("stopped", ["train 0", "codes 1", "train 1", "codes 2", "train 2"])
def test_a_run_that_stopped_resumes_where_it_was(tmp_path: Path, stopped: str) -> None:
    stages, done = stages_of(tmp_path, 100, [20, 60]), []  # type: ignore[var-annotated]
    with pytest.raises(ValueError, match="killed"):
        run_stages(stages, record_of(tmp_path), seed=1, **recording(tmp_path, done, fails=stopped))
    begun = done.index(stopped)
    run_stages(stages, record_of(tmp_path), seed=1, **recording(tmp_path, done))
    again = [stopped] if stopped[:5] == "codes" or stopped == "train 0" else [f"codes {stopped[-1]}", stopped]
    whole = ["train 0", "codes 1", "train 1", "codes 2", "train 2"]
    assert done == [*whole[: begun + 1], *again, *whole[begun + 1 :]]
    assert [updates_of(stage.teacher) for stage in stages[1:]] == [20, 60]


def test_a_lost_copy_of_the_model_is_named(tmp_path: Path) -> None:
    stage = stages_of(tmp_path, 100, [20])[1]
    write_checkpoint(tmp_path / LAST, 50)
    with pytest.raises(ValueError, match=r"model\.pt, the model after update 20, is missing, and .* has seen 50 upd"):
        begin_stage(stage, tmp_path)


def test_other_settings_are_refused_once_a_checkpoint_is_there(tmp_path: Path) -> None:
    stages = stages_of(tmp_path, 100, [20])

    def begin(**settings: object) -> None:
        keep_stages(record_of(tmp_path), stages, settings, ["stages"])

    begin(stages=[20], layer=1)
    begin(stages=[30], layer=1)  # a mistyped flag that nothing was trained with
    write_checkpoint(tmp_path / LAST, 5)
    with pytest.raises(ValueError, match=r"stages is \[30\] there and \[40\] now\. Choose another --save-dir"):
        begin(stages=[40], layer=1)
    begin(stages=[30], layer=9, k=4)
    begin(stages=[30], layer=2, iterations=5)  # as long as there are no codes
    stages[1].dictionary.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"layer is 2 there and 1 now\. Choose another --save-dir"):
        begin(stages=[30], layer=1, iterations=5)
    begin(stages=[30], layer=2, iterations=5)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run with a dictionary, whose record an earlier version wrote."""
    write_checkpoint(tmp_path / LAST, 20)
    stages_of(tmp_path, 100, [20])[1].dictionary.mkdir(parents=True)
    write_json(tmp_path / "stages.json", {"stages": [20], "lambda": 0.05})
    return tmp_path


def begin_with(run: Path, **changed: object) -> dict[str, object]:
    settings: dict[str, object] = {"stages": [20], "lambda_": 0.05, "batch_size": 400, **changed}
    keep_stages(record_of(run), stages_of(run, 100, [20]), settings, ["stages"])
    return settings


def test_a_record_of_an_earlier_version_is_completed(earlier: Path) -> None:
    begin_with(earlier)
    with pytest.raises(ValueError, match=r"lambda_ is 0\.05 there and 0\.1 now"):
        begin_with(earlier, lambda_=0.1)
    with pytest.raises(ValueError, match="batch_size is 400 there and 100 now"):
        begin_with(earlier, batch_size=100)


def test_a_refused_run_does_not_complete_the_record(earlier: Path) -> None:
    with pytest.raises(ValueError, match=r"other settings: lambda_ is 0\.05 there and 0\.1 now\. Choose"):
        begin_with(earlier, lambda_=0.1, batch_size=100)
    assert not record_of(earlier).path.exists()
    settings = begin_with(earlier)
    assert record_of(earlier).settings_of("stages") == settings


def test_a_new_head_leaves_everything_else_as_it_is(tiny: TinyData, tmp_path: Path) -> None:
    flags = ("--num-atoms", 7, "--max-positions", 24, "--tokens-per-sample", 24)
    last = save_untrained(tiny.data_bin, tmp_path, *flags)
    before = read_contents(last)
    stage = Stage(2, 0, 5, tmp_path / "stage-2")
    restart_head(stage, tmp_path, seed=3)
    after = read_contents(last)
    changed = [name for name, values in after["model"].items() if not torch.equal(values, before["model"][name])]
    assert changed == [f"{ATOM_PROJECTION}weight"]  # the bias is 0 in a new model
    new = after["model"][changed[0]]
    assert new.shape == (7, 32)
    assert float(new.std()) == pytest.approx(0.02, rel=0.2)
    del before["task_state"]  # of the codes of the stage before
    assert {**after, "model": 0} == {**before, "model": 0}
    restart_head(stage, tmp_path, seed=3)
    assert torch.equal(read_contents(last)["model"][changed[0]], new)
    restart_head(Stage(3, 4, 5, tmp_path), tmp_path, seed=3)  # has begun to train
    assert torch.equal(read_contents(last)["model"][changed[0]], new)


def test_seconds_of_a_part_are_those_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(1, 0, 5, tmp_path)
    clock = iter([0, 100, 200, 230, 300, 300.5])  # a run that is stopped, one that goes on, and one with nothing to do
    monkeypatch.setattr(staged_pretraining, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    write_json(tmp_path / "seconds.json", {"stage 1: codes": 1000})  # of an earlier version
    with pytest.raises(KeyboardInterrupt), measured(record_of(tmp_path), stage, "codes"):
        raise KeyboardInterrupt
    for seconds in (1130, 1130.5):
        with measured(record_of(tmp_path), stage, "codes"):
            pass
        assert record_of(tmp_path).seconds_of("stage 1: codes") == seconds


def test_seconds_of_several_processes_are_those_of_the_first(tmp_path: Path) -> None:
    with measured(StepRecord(tmp_path / "steps.json", ProcessRank(1, 2)), Stage(1, 0, 5, tmp_path), "codes"):
        pass
    assert not list(tmp_path.iterdir())
