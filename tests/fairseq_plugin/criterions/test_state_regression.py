"""The criterion of masked LM with regression of hidden states."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics

from mlsm_plugin.fairseq_plugin.criterions.state_regression import StateRegressionCriterion
from tests.conftest import Pipeline
from tests.tiny_run import each_batch, in_torch_ddp, seeded_model, training_config

NAMES = {"task": "state_regression", "criterion": "state_regression"}


@pytest.fixture(params=["mlsm_roberta_tiny", "mlsm_modern_tiny"])
def run(pipeline: Pipeline, request: pytest.FixtureRequest) -> Any:
    """Task, model, criterion that has not begun, and a batch."""
    flags = ("--auxiliary-checkpoint", pipeline.auxiliary, "--regression-weight", 0.5, "--dropout", 0)
    cfg = training_config(pipeline.data_bin, *flags, arch=request.param, **NAMES)
    task = tasks.setup_task(cfg.task)
    model = seeded_model(cfg, task).eval()
    criterion = task.build_criterion(cfg.criterion).eval()
    batch = task._with_states(next(each_batch(cfg, task=task)))
    return SimpleNamespace(task=task, model=model, criterion=criterion, batch=batch, cfg=cfg)


def test_the_loss_is_that_of_masked_lm_and_the_weighted_error(run: Any) -> None:
    criterion = run.criterion
    criterion.standardize([run.batch["states"]])
    loss, number, log = criterion(run.model, run.batch)
    masked = run.batch["target"] != 1
    logits, _ = run.model(**run.batch["net_input"], masked_tokens=masked)
    features, _ = run.model(**run.batch["net_input"], features_only=True)
    mlm = torch.nn.functional.cross_entropy(logits, run.batch["target"][masked], reduction="sum")
    transformed = run.model.encoder.lm_head.transform(features[masked])
    error = criterion.regression(transformed, run.batch["states"]).sum()
    assert int(number) == int(masked.sum()) == len(run.batch["states"])
    assert float(log["mlm_loss"]) == pytest.approx(float(mlm), rel=1e-5)
    assert float(log["state_loss"]) == pytest.approx(float(error), rel=1e-5)
    assert float(loss) == pytest.approx(float(mlm + 0.5 * error), rel=1e-5)
    with metrics.aggregate() as logged:
        StateRegressionCriterion.reduce_metrics([log, log])
    values = logged.get_smoothed_values()
    assert values["state_loss"] == pytest.approx(float(error) / int(number), abs=1e-3)
    assert values["mlm_loss"] == pytest.approx(float(mlm) / int(number) / math.log(2), abs=1e-3)


def test_a_layer_that_was_not_loaded_takes_no_part(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """``fairseq-validate`` loads only the model."""
    with caplog.at_level(logging.WARNING):
        loss, _, log = run.criterion(run.model, run.batch)
        run.criterion(run.model, run.batch)
    assert float(loss) == pytest.approx(float(log["mlm_loss"]))
    assert "state_loss" not in log
    assert caplog.text.count("the layer that predicts hidden states is not loaded") == 1
    begun = run.task.build_criterion(run.cfg.criterion)
    begun.standardize([run.batch["states"]])
    run.criterion.load_state_dict(begun.state_dict())
    assert "state_loss" in run.criterion(run.model, run.batch)[2]


def test_a_checkpoint_of_another_criterion_leaves_the_new_layer(run: Any) -> None:
    before = {name: values.clone() for name, values in run.criterion.state_dict().items()}
    assert run.criterion.load_state_dict(None, strict=True) is None
    assert all(torch.equal(before[name], values) for name, values in run.criterion.state_dict().items())


def test_every_parameter_takes_part_as_torch_ddp_demands(run: Any, tmp_path: Path) -> None:
    run.criterion.standardize([run.batch["states"]])

    def train(model: Any) -> None:
        wrapped = torch.nn.parallel.DistributedDataParallel(run.criterion)
        for _ in range(3):
            loss, _, _ = wrapped(model, run.batch)
            loss.backward()

    in_torch_ddp(run.model, tmp_path, train)
    for part in (run.model, run.criterion):
        assert all(parameter.grad is not None for parameter in part.parameters())


def test_what_does_not_fit_is_an_error(run: Any, pipeline: Pipeline) -> None:
    run.cfg.criterion.regression_weight = 0.0
    with pytest.raises(ValueError, match="--regression-weight must be positive and finite, got 0"):
        StateRegressionCriterion(run.cfg.criterion, run.task)
    stock = tasks.setup_task(training_config(pipeline.data_bin, task="masked_lm", criterion="masked_lm").task)
    with pytest.raises(ValueError, match="needs --task state_regression"):
        StateRegressionCriterion(run.cfg.criterion, stock)
