"""The criterion that learns vectors of texts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq import tasks
from fairseq.logging import metrics

from mlsm_plugin.fairseq_plugin.criterions.sentence_vectors import SentenceVectorsCriterion
from tests.conftest import Pipeline
from tests.tiny_run import each_batch, in_torch_ddp, seeded_model, training_config

NAMES = {"task": "sentence_vectors", "criterion": "sentence_vectors"}
PADDING = 1


@pytest.fixture(params=["mlsm_roberta_tiny", "mlsm_modern_tiny"])
def run(pipeline: Pipeline, request: pytest.FixtureRequest) -> Any:
    """Task, model, criterion and a batch with vectors."""
    flags = ("--auxiliary-checkpoint", pipeline.auxiliary, "--dropout", 0)
    cfg = training_config(pipeline.data_bin, *flags, arch=request.param, **NAMES)
    task = tasks.setup_task(cfg.task)
    model = seeded_model(cfg, task).eval()
    criterion = task.build_criterion(cfg.criterion).eval()
    batch = task.prepare_batch(next(each_batch(cfg, task=task)), criterion, 0)
    return SimpleNamespace(task=task, model=model, criterion=criterion, batch=batch)


def test_the_loss_is_the_squared_error_of_the_mean_of_the_hidden_states(run: Any) -> None:
    run.batch["vectors"][1] = 0  # a text without a vector
    loss, number, log = run.criterion(run.model, run.batch)
    tokens = run.batch["net_input"]["src_tokens"]
    rows = len(tokens)
    expected = 0.0
    for row in (0, *range(2, rows)):
        text = tokens[row][tokens[row] != PADDING]
        vector = run.model(text[None], features_only=True)[0][0].double().mean(dim=0)
        expected += float((vector - run.batch["vectors"][row]).square().mean().detach())
    assert int(number) == rows - 1
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    with metrics.aggregate() as logged:
        SentenceVectorsCriterion.reduce_metrics([log, log])
    assert logged.get_smoothed_values()["loss"] == pytest.approx(expected / (rows - 1), abs=1e-5)


def test_every_parameter_takes_part_as_torch_ddp_demands(run: Any, tmp_path: Path) -> None:
    def train(model: Any) -> None:
        for _ in range(3):
            loss, _, _ = run.criterion(model, run.batch)
            loss.backward()

    in_torch_ddp(run.model, tmp_path, train)
    assert all(parameter.grad is not None for parameter in run.model.parameters())


def test_it_needs_the_vectors_of_its_task(pipeline: Pipeline) -> None:
    stock = tasks.setup_task(training_config(pipeline.data_bin, task="masked_lm", criterion="masked_lm").task)
    with pytest.raises(ValueError, match="--criterion sentence_vectors needs --task sentence_vectors"):
        SentenceVectorsCriterion(stock)
