"""``--autocast``: what runs in bfloat16, and what does not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.models import BaseFairseqModel

from mlsm_plugin.fairseq_plugin.optimizers.fused_adamw import EMBEDDINGS, GROUP_ATTRIBUTE
from mlsm_plugin.fairseq_plugin.tasks import plugin_task
from tests.tiny_models import TinyData, positions
from tests.tiny_run import each_batch, seeded_model, training_config

PLAIN: Any = {"task": "plain_masked_lm", "criterion": "masked_lm", "arch": "mlsm_modern_tiny"}
OTHERS: Any = (
    PLAIN,
    {"task": "taco", "criterion": "token_contrastive", "arch": "mlsm_roberta_tiny"},
    {"task": "nonparametric_masked_lm", "criterion": "span_contrastive", "arch": "mlsm_modern_tiny"},
    {"task": "span_denoising", "criterion": "cross_entropy", "arch": "denoising_small"},
)


class KeepsGradients:
    """An optimizer that only keeps the gradients."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Sees(BaseFairseqModel):
    """A model with a parameter that notes in which precision a criterion would compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.seen: list[torch.dtype] = []

    def criterion(self, model: Any, sample: Any) -> Any:
        product = self.weight @ self.weight
        self.seen.append(product.dtype)
        return product.float().sum(), 1, {}


def task_of(tiny: TinyData, *flags: object, **options: Any) -> Any:
    return tasks.setup_task(training_config(tiny.data_bin, *positions(24), *flags, **{**PLAIN, **options}).task)


@pytest.mark.parametrize(
    ("flags", "fast", "expected"),
    [
        ((), True, torch.float32),
        (("--autocast", "off"), True, torch.float32),
        (("--autocast", "bf16"), False, torch.bfloat16),
        (("--autocast", "auto"), True, torch.bfloat16),
        (("--autocast", "auto"), False, torch.float32),
        (("--autocast", "auto", "--fp16"), True, torch.float32),  # fairseq's own half precision
    ],
)
def test_steps_of_training_and_validation_are_in_the_precision_asked_for(
    tiny: TinyData, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], fast: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(plugin_task, "has_fast_bf16", lambda device: fast)
    task, model = task_of(tiny, *flags), Sees()
    task.train_step({}, model, model.criterion, KeepsGradients(), 0)
    task.valid_step({}, model, model.criterion)
    assert model.seen == [expected, expected]
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("other", ["--fp16", "--bf16", "--amp"])
def test_two_kinds_of_reduced_precision_are_refused(tiny: TinyData, other: str) -> None:
    with pytest.raises(ValueError, match=f"--autocast bf16 keeps the weights in float32; leave out {other}"):
        task_of(tiny, "--autocast", "bf16", other)


@pytest.mark.parametrize("options", OTHERS, ids=lambda options: options["task"])
def test_losses_of_all_tasks_are_in_float32_and_near_those_without(tiny: TinyData, options: Any) -> None:
    seen = {}
    small = () if "denoising" in options["task"] else ("--max-positions", 40)
    if "denoising" in options["task"]:
        small = tuple(
            word for side in ("encoder", "decoder") for word in
            (f"--{side}-layers", 1, f"--{side}-embed-dim", 32, f"--{side}-ffn-embed-dim", 64,
             f"--{side}-attention-heads", 2)
        )  # fmt: skip
    for precision in ("off", "bf16"):
        flags = ("--autocast", precision, "--tokens-per-sample", 24, "--dropout", 0, *small)
        options_of_roberta = ("--attention-dropout", 0)
        cfg = training_config(tiny.data_bin, *flags, *options_of_roberta, **options)
        task = tasks.setup_task(cfg.task)
        model, criterion = seeded_model(cfg, task), task.build_criterion(cfg.criterion)
        sample = next(each_batch(cfg, task=task))
        loss, _, _ = task.train_step(sample, model, criterion, KeepsGradients(), 0)
        assert loss.dtype == torch.float32
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        validated, _, _ = task.valid_step(sample, model, criterion)
        assert validated.dtype == torch.float32
        seen[precision] = (loss.item(), validated.item())
        for marked in (module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)):
            assert getattr(marked, GROUP_ATTRIBUTE) == EMBEDDINGS
    assert seen["bf16"] == pytest.approx(seen["off"], rel=0.02)
    assert seen["bf16"] != seen["off"]


def test_stock_tasks_know_nothing_of_it(tiny: TinyData) -> None:
    with contextlib.redirect_stderr(None), pytest.raises(SystemExit):
        training_config(tiny.data_bin, "--autocast", "bf16", task="masked_lm", criterion="masked_lm")
