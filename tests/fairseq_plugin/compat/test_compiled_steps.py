from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fairseq import tasks
from torch._dynamo.exc import TorchDynamoException

from mlsm_plugin.fairseq_plugin.tasks.plugin_task import LONG_RUN
from tests.tiny_run import each_batch, seeded_model, training_config

MLM = {"task": "plain_masked_lm", "criterion": "masked_lm"}


def parts_of(pipeline: Any, *flags: Any, arch: str = "mlsm_modern_tiny") -> tuple[Any, Any, Any, Any]:
    """Task, model, criterion and a batch."""
    cfg = training_config(pipeline.data_bin, *flags, arch=arch, **MLM)
    task = tasks.setup_task(cfg.task)
    return task, seeded_model(cfg, task), task.build_criterion(cfg.criterion), next(each_batch(cfg, task=task))


@pytest.fixture
def failing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compiled module fails when it is called."""

    def compile_badly(module: torch.nn.Module, **options: Any) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise TorchDynamoException("no compiler here\nand more")

        module._compiled_call_impl = fail  # type: ignore[assignment]

    monkeypatch.setattr(torch.nn.Module, "compile", compile_badly)


def test_on_a_cpu_nothing_is_compiled_unless_asked_for(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [parts_of(pipeline, "--compile", how)[0].compiles for how in ("auto", "on", "off")] == [False, True, False]


def test_on_a_gpu_a_long_run_is_compiled(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = parts_of(pipeline)[0]
    other = parts_of(pipeline, arch="mlsm_roberta_tiny")[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    task.cfg.max_update = LONG_RUN
    assert not task.compiles  # the run is on the CPU
    task.cfg.cpu = other.cfg.cpu = False
    found = {}
    for updates in (0, 1, LONG_RUN - 1, LONG_RUN):
        task.cfg.max_update = other.cfg.max_update = updates
        found[updates] = task.compiles
        assert not other.compiles  # it is not one graph
    assert found == {0: True, 1: False, LONG_RUN - 1: False, LONG_RUN: True}


def test_without_a_compiler_training_goes_on_with_one_line(
    pipeline: Any, failing_compiler: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected_parts = parts_of(pipeline, "--compile", "off")
    expected = expected_parts[0].valid_step(expected_parts[3], *expected_parts[1:3])[0]
    task, model, criterion, sample = parts_of(pipeline, "--max-update", LONG_RUN)
    task.cfg.cpu = False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        losses = [task.valid_step(sample, model, criterion)[0] for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == ["the model is not compiled: no compiler here"]
    torch.testing.assert_close(losses, [expected] * 2)


def test_what_was_asked_for_and_cannot_be_is_an_error(pipeline: Any, failing_compiler: None) -> None:
    task, model, criterion, sample = parts_of(pipeline, "--compile", "on")
    with pytest.raises(ValueError, match=r"^--compile on: no compiler here; pass --compile off$"):
        task.valid_step(sample, model, criterion)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mlsm_modern_tiny", "mlsm_roberta_tiny"])
def test_a_compiled_model_has_the_same_loss_and_names(pipeline: Any, arch: str) -> None:
    torch._dynamo.reset()
    losses, names = [], []
    for how in ("off", "on"):
        task, model, criterion, sample = parts_of(pipeline, "--compile", how, "--dropout", 0, arch=arch)
        losses.append(task.valid_step(sample, model, criterion)[0])
        names.append(list(model.state_dict()))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-4)
    assert names[0] == names[1]


def test_what_is_compiled_wrongly_on_a_cpu_is_refused(pipeline: Any) -> None:
    bf16 = ("--compile", "on", "--autocast", "bf16")
    task, model, criterion, sample = parts_of(pipeline, *bf16, arch="mlsm_roberta_tiny")
    with pytest.raises(ValueError, match="wrong gradients in bfloat16 on a CPU; pass --autocast off or --compile off"):
        task.valid_step(sample, model, criterion)
