"""A step never asks for a number that a GPU would first have to compute."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import tasks, utils
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_run import each_batch, seeded_model, training_config

OBJECTIVES = {
    "mlm": ("plain_masked_lm", "masked_lm", ()),
    "mlsm": ("masked_latent_semantic", "latent_semantic_kl", ()),
    "mlsm+mlm": ("masked_latent_semantic", "latent_semantic_kl", ("--mlm-weight", 1)),
}
ARCHS = ["mlsm_modern_tiny", "mlsm_deberta_tiny"]
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}


class Waits(TorchDispatchMode):
    """Records operations whose result, or its shape, depends on numbers in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        if name in WAITING or any(index is not None and index.dtype == torch.bool for index in indices):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def step(pipeline: Any, objective: str, *flags: Any, arch: str = "mlsm_modern_tiny") -> tuple[Any, Any, Any, Any]:
    """Task, model, criterion and a batch."""
    task_name, criterion_name, more = OBJECTIVES[objective]
    named = {"task": task_name, "criterion": criterion_name, "arch": arch}
    cfg = training_config(pipeline.data_bin, *more, *flags, **named)
    task = tasks.setup_task(cfg.task)
    sample = next(each_batch(cfg, task=task))
    return task, seeded_model(cfg, task).train(), task.build_criterion(cfg.criterion), sample


def train(task: Any, model: Any, criterion: Any, sample: Any) -> None:
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    task.train_step(sample, model, criterion, optimizer, 0)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    mode = Waits()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: mode.found.append("tolist") or tensor.numpy().tolist())
    return mode


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("autocast", "arch"), [(how, arch) for how in ("off", "bf16") for arch in ARCHS])
def test_no_operation_of_a_step_waits(pipeline: Any, waits: Waits, objective: str, autocast: str, arch: str) -> None:
    parts = step(pipeline, objective, "--autocast", autocast, arch=arch)
    with waits:
        train(*parts)
    assert waits.found == []


def test_what_waits_is_noticed(pipeline: Any, waits: Waits) -> None:
    task, model, criterion, sample = step(pipeline, "mlm")
    del sample["masked_sizes"]
    with waits:
        train(task, model, criterion, sample)
        sample["target"][sample["target"] > 9].max().item()
    assert set(waits.found) == {"tolist", "index", "_local_scalar_dense"}


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_step_waits_for_a_gpu(pipeline: Any, objective: str, arch: str) -> None:
    task, model, criterion, sample = step(pipeline, objective, "--autocast", "bf16", "--compile", "off", arch=arch)
    model, sample = model.cuda(), utils.move_to_cuda(sample)
    train(task, model, criterion, sample)  # the first step sets up
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(task, model, criterion, sample)
            waited = [str(one.message) for one in caught if "synchroniz" in str(one.message)]
            sample["target"].max().item()  # this does wait
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waited == []
    assert any("synchroniz" in str(one.message) for one in caught)
