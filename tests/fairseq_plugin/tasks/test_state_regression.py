"""The task of masked LM with regression of hidden states, and whole runs of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import tasks

from mlsm_plugin.core.hidden_states.sources import open_encoder
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import read_contents
from tests.conftest import Pipeline, fairseq_train, logged, mlsm
from tests.runs.training_runs import assert_same_updates, text_of, train_on_two_ranks, updates_in
from tests.tiny_run import each_batch, training_config

TASK = "state_regression"
NAMES = {"task": TASK, "criterion": TASK}


def with_states(pipeline: Pipeline, *flags: object) -> tuple[Any, Any]:
    """The task, and a batch with hidden states."""
    cfg = training_config(pipeline.data_bin, "--auxiliary-checkpoint", pipeline.auxiliary, *flags, **NAMES)
    task = tasks.setup_task(cfg.task)
    return task, task._with_states(next(each_batch(cfg, task=task)))


def test_a_batch_has_the_states_of_its_masked_tokens_in_the_unmasked_text(pipeline: Pipeline) -> None:
    _, batch = with_states(pipeline, "--auxiliary-layer", 1)
    masked = batch["target"] != 1
    tokens = torch.where(masked, batch["target"], batch["net_input"]["src_tokens"])
    encoder = open_encoder(pipeline.auxiliary, pipeline.data_bin, layer=1, device="cpu", fp16=None)
    torch.testing.assert_close(batch["states"], encoder.hidden_states(tokens)[masked], rtol=1e-3, atol=1e-3)


def test_errors(pipeline: Pipeline) -> None:
    cfg = training_config(pipeline.data_bin, **NAMES)
    with pytest.raises(ValueError, match="--task state_regression needs --auxiliary-checkpoint"):
        tasks.setup_task(cfg.task).load_dataset("train")
    cfg = training_config(pipeline.data_bin, arch="roberta", **NAMES)
    with pytest.raises(ValueError, match="--task state_regression needs --arch mlsm_modern_base"):
        tasks.setup_task(cfg.task).build_model(cfg.model)
    task, _ = with_states(pipeline)
    with pytest.raises(ValueError, match="--auxiliary-layer is 2, and the run began with 1; pass that, or another"):
        task.check_resumes({**task.state_dict(), "states_layer": 1})
    with pytest.raises(ValueError, match="--auxiliary-checkpoint is another model than that of the run"):
        task.check_resumes({**task.state_dict(), "states_of": "0" * 64})
    with pytest.raises(
        ValueError, match="the run did not begin with --task state_regression and an auxiliary model; pass"
    ):
        task.check_resumes({})


def test_the_layer_of_another_auxiliary_model_is_not_loaded(pipeline: Pipeline, tmp_path: Path) -> None:
    cfg = training_config(pipeline.data_bin, "--auxiliary-checkpoint", pipeline.auxiliary, **NAMES)
    cfg.task.save_dir = str(tmp_path)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    task.build_model(cfg.model)
    saved = task.state_dict()
    for changes, loads in (({}, True), ({"states_layer": 1}, False), ({"states_of": "0" * 64}, False)):
        task.check_starts_from(tmp_path / "other.pt", {**saved, **changes})
        criterion = task.build_criterion(cfg.criterion)
        state = {name: torch.ones_like(values) for name, values in criterion.state_dict().items()}
        if not loads:
            state["regression.mean"] = torch.ones(7)  # of another width
        criterion.load_state_dict(state)
        assert criterion.is_ready is loads
        assert bool((criterion.regression.mean == 1).all()) is loads
    with pytest.raises(ValueError, match="--auxiliary-checkpoint is another model than that of the run"):
        task.check_starts_from(tmp_path / "checkpoint_last.pt", {**saved, "states_of": "0" * 64})
    task.check_starts_from(tmp_path / "checkpoint_last.pt", {"vocabulary": saved.get("vocabulary")})  # of masked LM


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_the_values_of_its_states(pipeline: Pipeline) -> None:
    """With ``--restore-file``, fairseq goes on in the epoch of the checkpoint, whose masks are others."""
    cfg = training_config(pipeline.data_bin, "--auxiliary-checkpoint", pipeline.auxiliary, **NAMES)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    task.build_model(cfg.model)
    for updates, loads, keeps in ((3, True, True), (3, False, False), (0, True, False)):
        criterion = task.build_criterion(cfg.criterion)
        if loads:
            criterion.load_state_dict(criterion.state_dict())
        trainer = SimpleNamespace(
            get_criterion=lambda: criterion,  # noqa: B023
            get_num_updates=lambda: updates,  # noqa: B023
            device=torch.device("cpu"),
        )
        task.begin_run(trainer, {})
        assert criterion.is_ready
        assert criterion.regression.is_standardized is not keeps


@pytest.mark.slow
def test_runs_learn_resume_start_from_masked_lm_and_are_exported(pipeline: Pipeline, tmp_path: Path) -> None:
    def train(name: str, updates: int, *flags: object, task: str = TASK) -> Any:
        auxiliary = ("--auxiliary-checkpoint", pipeline.auxiliary) if task == TASK else ()
        return fairseq_train(pipeline.data_bin, tmp_path / name, *auxiliary, "--max-update", updates, *flags, task=task)

    whole = train("whole", 6)
    assert len(logged(whole, "state_loss")) == 6
    train("stopped", 3)
    train("stopped", 6)
    states = [read_contents(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "stopped")]
    for part in ("model", "criterion"):
        first, second = (state[part] for state in states)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(states[0]["criterion"]["regression.mean"], torch.zeros(32))
    train("mlm", 2, task="plain_masked_lm")
    train("warm", 2, "--finetune-from-model", tmp_path / "mlm" / "checkpoint_last.pt")
    train("wide", 1, "--encoder-embed-dim", 64, task="plain_masked_lm")
    other = ("--auxiliary-checkpoint", tmp_path / "wide" / "checkpoint_last.pt")
    train("other", 2, "--finetune-from-model", tmp_path / "whole" / "checkpoint_last.pt", *other)
    mlsm("convert", tmp_path / "whole", tmp_path / "exported", "--text", pipeline.valid_text, "--lines", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_two_ranks_compute_what_one_rank_computes_from_both_their_batches(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = ("--task", TASK, "--criterion", TASK, "--auxiliary-checkpoint", pipeline.auxiliary, "--dropout", 0)
    flags = (*flags, "--attention-dropout", 0, "--max-update", 4, "--no-save", "--disable-validation")
    ranks = train_on_two_ranks(pipeline.data_bin, tmp_path, *flags, "--ddp-backend", "legacy_ddp")
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stdout[-3000:]
    alone = fairseq_train(pipeline.data_bin, tmp_path, *flags, "--update-freq", 2, task=TASK)
    assert_same_updates(updates_in(ranks[0].stdout), updates_in(text_of(alone)), 4)
