"""What the tasks with an auxiliary model share: it is recorded, and stays the same in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fairseq import tasks

from mlsm_plugin.fairseq_plugin.tasks.auxiliary_model_task import AuxiliaryModelTask
from tests.conftest import WITH_AUXILIARY, Pipeline
from tests.tiny_run import training_config

KEYS = {"state_regression": "states", "sentence_vectors": "vectors"}


def task_of(pipeline: Pipeline, name: str, *flags: object) -> AuxiliaryModelTask:
    more = ("--auxiliary-checkpoint", pipeline.auxiliary, *flags)
    task = tasks.setup_task(training_config(pipeline.data_bin, *more, task=name, criterion=name).task)
    assert isinstance(task, AuxiliaryModelTask)
    task.open_auxiliary()
    return task


@pytest.mark.parametrize("name", WITH_AUXILIARY)
def test_a_run_keeps_its_auxiliary_model(pipeline: Pipeline, tmp_path: Path, name: str) -> None:
    task = task_of(pipeline, name, "--save-dir", tmp_path)
    saved = dict(task.state_dict())
    key = KEYS[name]
    assert {f"{key}_of", f"{key}_layer"} <= set(saved)
    assert len(saved[f"{key}_of"]) == 64
    task.check_resumes(saved)
    changes: dict[str, tuple[object, str]] = {
        f"{key}_of": ("0" * 64, "--auxiliary-checkpoint is another model than that of the run"),
        f"{key}_layer": (1, "--auxiliary-layer is 2, and the run began with 1; pass that, or another --save-dir"),
        f"{key}_alignment": ("0" * 64, "the tokenizer of --auxiliary-checkpoint is another one than that of the run"),
    }
    for changed, (value, message) in changes.items():
        with pytest.raises(ValueError, match=message):
            task.check_resumes({**saved, changed: value})
        with pytest.raises(ValueError, match=message):
            task.check_starts_from(tmp_path / "checkpoint_last.pt", {**saved, changed: value})
    for other in WITH_AUXILIARY:
        if other != name:
            with pytest.raises(ValueError, match=f"did not begin with --task {name} and an auxiliary model; pass"):
                task.check_resumes(dict(task_of(pipeline, other).state_dict()))


@pytest.mark.parametrize("name", WITH_AUXILIARY)
def test_a_checkpoint_of_another_auxiliary_model_is_noticed(pipeline: Pipeline, tmp_path: Path, name: str) -> None:
    task = task_of(pipeline, name, "--save-dir", tmp_path)
    saved = dict(task.state_dict())
    for state, same in ((saved, True), ({**saved, f"{KEYS[name]}_of": "0" * 64}, False), ({}, False)):
        task.check_starts_from(tmp_path / "other.pt", state)
        assert task.same_auxiliary is same


def test_the_model_is_only_read_when_it_is_needed(pipeline: Pipeline) -> None:
    """A checkpoint loads without it."""
    for name in WITH_AUXILIARY:
        task = tasks.setup_task(training_config(pipeline.data_bin, task=name, criterion=name).task)
        with pytest.raises(ValueError, match=f"--task {name} needs --auxiliary-checkpoint"):
            task.open_auxiliary()
