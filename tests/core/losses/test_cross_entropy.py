from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.losses import cross_entropy
from mlsm_plugin.core.losses.cross_entropy import token_cross_entropy


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 7), st.integers(1, 9), st.integers(1, 20), st.integers(0, 99))
def test_it_is_the_negative_log_probability_however_it_is_cut(rows: int, symbols: int, entries: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = (3 * torch.randn(rows, symbols, dtype=torch.float64)).requires_grad_()
    targets, weights = torch.randint(0, symbols, (rows,)), torch.randn(rows, dtype=torch.float64)
    targets[torch.rand(rows) < 0.3] = -100
    before, cross_entropy.CHUNK_ENTRIES = cross_entropy.CHUNK_ENTRIES, entries
    try:
        losses = token_cross_entropy(logits, targets)
    finally:
        cross_entropy.CHUNK_ENTRIES = before
    (losses * weights).sum().backward()
    for row, target, found, weight, gradient in zip(
        logits.tolist(), targets.tolist(), losses.tolist(), weights.tolist(), logits.grad.tolist(), strict=True
    ):
        total = sum(map(math.exp, row))
        counted = target != -100
        assert found == pytest.approx(math.log(total) - row[target] if counted else 0.0)
        expected = [weight * (math.exp(value) / total - (place == target)) for place, value in enumerate(row)]
        assert gradient == pytest.approx(expected if counted else [0.0] * symbols)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, targets = (5 * torch.randn(40, 300)).to(dtype), torch.randint(0, 300, (40,))
    found: list[Any] = []
    for values in (logits.clone().requires_grad_(), logits.double().requires_grad_()):
        losses = token_cross_entropy(values, targets)
        losses.sum().backward()
        found.append((losses.double(), values.grad.double()))
        assert values.grad.dtype == values.dtype
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(gradient for _, gradient in found), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_large_logits_and_no_logits_are_finite() -> None:
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    losses = token_cross_entropy(logits, torch.tensor([1, -100]))
    losses.sum().backward()
    assert losses.tolist() == [2e4, 0]
    assert logits.grad.tolist() == [[1, -1], [0, 0]]
    assert token_cross_entropy(torch.zeros(0, 3, requires_grad=True), torch.zeros(0, dtype=torch.long)).sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_that_of_the_library_to_the_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, 5000, (300,))
    targets[::7] = -100
    found = []
    for loss_of in (token_cross_entropy, library_cross_entropy):
        logits = (5 * torch.randn(300, 5000, generator=torch.Generator().manual_seed(1))).to(dtype).requires_grad_()
        losses = loss_of(logits, targets)
        losses.sum().backward()
        found.append((losses.detach(), logits.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def library_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def test_a_row_that_does_not_count_has_no_loss_whatever_its_logits() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 1.0], [1.0, 2.0, 3.0]], requires_grad=True)
    losses = token_cross_entropy(logits, torch.tensor([-100, 1]))
    (losses * torch.tensor([3.0, 2.0])).sum().backward()
    assert losses[0] == 0
    assert logits.grad[0].tolist() == [0, 0, 0]
    assert logits.grad[1].sum().abs() < 1e-6
