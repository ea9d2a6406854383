"""Every finite batch gives a finite loss and gradient in every objective, also under autocast; so does every coder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from tests.conftest import CRITERIONS, Pipeline
from tests.denoising_flags import SIZE
from tests.tiny_run import each_batch, seeded_model, training_config

PADDING, UNKNOWN = 1, 3
MODERN = ("--arch", "mlsm_modern_tiny", "--encoder-layers", 1)
FLAGS: dict[str, tuple[object, ...]] = {
    "plain_masked_lm": (),
    "masked_latent_semantic": ("--mlm-weight", 1),
    "taco": (),
    "nonparametric_masked_lm": ("--group-size", 4),
    "span_denoising": (*SIZE, "--sample-break-mode", "none", "--tokens-per-sample", 48),
    "state_regression": ("--auxiliary-checkpoint", "AUXILIARY", "--tokens-per-sample", 48),
    "sentence_vectors": ("--auxiliary-checkpoint", "AUXILIARY", "--tokens-per-sample", 48),
}
NO_CODES = {"atoms": torch.zeros(0, 0, dtype=torch.int32), "weights": torch.zeros(0, 0).half()}
Batch = dict[str, Any]


def as_it_is(batch: Batch) -> None:
    """A real batch."""


def nothing_masked(batch: Batch) -> None:
    if "spans" in batch:
        batch["spans"] = {name: values[:0] for name, values in batch["spans"].items()}
    elif "target" in batch:
        batch["target"].fill_(PADDING)
    if "codes" in batch:
        batch["codes"] = copy.deepcopy(NO_CODES)


def all_padding(batch: Batch) -> None:
    nothing_masked(batch)
    for tokens in (*batch["net_input"].values(), *batch.get("context", {}).values()):
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
            tokens.fill_(PADDING)


def all_unknown(batch: Batch) -> None:
    nothing_masked(batch)
    for tokens in (*batch["net_input"].values(), *batch.get("context", {}).values()):
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
            tokens.fill_(UNKNOWN)


def one_row(batch: Batch) -> None:
    nothing_masked(batch)
    for part in (batch["net_input"], batch.get("context", {}), batch):
        for name, value in part.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                part[name] = value[:1]


def one_token(batch: Batch) -> None:
    one_row(batch)
    for part in (batch["net_input"], batch.get("context", {}), batch):
        for name, value in part.items():
            if isinstance(value, torch.Tensor) and value.dim() == 2:
                part[name] = value[:, :1]


EDITS = (as_it_is, nothing_masked, all_padding, all_unknown, one_row, one_token)


@pytest.fixture(scope="module")
def made(pipeline: Pipeline) -> Callable[[str, bool], SimpleNamespace]:
    """A function that gives task, configuration and a batch of an objective; each is made once."""
    known: dict[tuple[str, bool], SimpleNamespace] = {}

    def make(name: str, modern: bool) -> SimpleNamespace:
        if (name, modern) not in known:
            flags = (*FLAGS[name], *(MODERN if modern else ()), "--autocast", "bf16")
            flags = tuple(pipeline.auxiliary if flag == "AUXILIARY" else flag for flag in flags)
            cfg = training_config(pipeline.data_bin, *flags, task=name, criterion=CRITERIONS[name])
            task = tasks.setup_task(cfg.task)
            task.build_model(cfg.model)
            known[name, modern] = SimpleNamespace(cfg=cfg, task=task, batch=next(each_batch(cfg, "valid", task=task)))
        return known[name, modern]

    return make


def check_step(
    made: SimpleNamespace, edit: Callable[[Batch], None], *, autocast: str, scale: float, dummy: bool
) -> None:
    cfg, task, batch = made.cfg, made.task, copy.deepcopy(made.batch)
    edit(batch)
    model = seeded_model(cfg, task).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    criterion = task.build_criterion(cfg.criterion).train()
    if hasattr(criterion, "standardize"):
        criterion.standardize([torch.randn(9, len(criterion.regression.mean))])
    if hasattr(criterion, "begin_update"):
        criterion.begin_update([batch], 0, device=torch.device("cpu"))
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    cfg.task.autocast = autocast
    task.cfg.autocast = autocast
    loss, _, log = task.train_step(batch, model, criterion, optimizer, 0, ignore_grad=dummy)
    assert bool(torch.as_tensor(loss).isfinite())
    assert all(bool(torch.as_tensor(value).isfinite().all()) for value in log.values())
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert gradients
    assert [name for name, value in gradients.items() if not bool(value.isfinite().all())] == []


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("modern", [False, True], ids=["roberta", "modern"])
@pytest.mark.parametrize("name", FLAGS)
def test_every_batch_gives_a_finite_step(made: Any, name: str, modern: bool, edit: Any) -> None:
    if name == "span_denoising" and modern:
        pytest.skip("an encoder-decoder")
    for autocast, scale in (("off", 1.0), ("off", 30.0), ("bf16", 30.0)):
        check_step(made(name, modern), edit, autocast=autocast, scale=scale, dummy=False)
    check_step(made(name, modern), edit, autocast="bf16", scale=1.0, dummy=True)


EXTREMES = st.sampled_from([0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, 1e-30, 3e4, -2e-5]) | st.floats(-10, 10, width=32)


@settings(deadline=None, max_examples=60)
@given(
    hidden=arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(6)), elements=EXTREMES),
    lambda_=st.sampled_from([1e-4, 0.05, 1.0, 100.0]),
    precision=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@pytest.mark.slow
def test_every_hidden_state_gets_a_finite_code(hidden: np.ndarray, lambda_: float, precision: torch.dtype) -> None:
    atoms = normalize_rows(np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32))
    coder = LassoCoder(AtomDictionary(atoms, {"lambda": lambda_}))
    rows = torch.from_numpy(hidden).to(precision).float()
    coded = coder.encode(rows, threads=1)
    assert coded.codes.shape == (len(hidden), 9)
    assert np.isfinite(coded.codes.data).all()
    assert (coded.codes.data >= 0).all()
