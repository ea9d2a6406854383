"""Codes of hidden states that are computed when a batch needs them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mlsm_plugin.core.coding.state_codes import StateCodes
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder
from mlsm_plugin.core.sparse_coding.sparse_coder import SparseCoder

DIM = 12
ATOMS = 30


def topk() -> SparseCoder:
    atoms = torch.randn(ATOMS, DIM, generator=torch.Generator().manual_seed(0))
    weights = SaeWeights(atoms, torch.full((ATOMS,), -0.3), atoms, torch.zeros(DIM))
    return SaeCoder(SparseAutoencoder(SaeConfig("topk", k=5), weights))


def lasso() -> SparseCoder:
    atoms = np.random.default_rng(0).normal(size=(ATOMS, DIM)).astype(np.float32)
    return LassoCoder(AtomDictionary(atoms / np.linalg.norm(atoms, axis=1, keepdims=True), {"lambda": 0.1}))


def states(number: int = 40) -> torch.Tensor:
    return torch.randn(number, DIM, generator=torch.Generator().manual_seed(1))


def dense(codes: dict[str, torch.Tensor]) -> np.ndarray:
    rows = np.zeros((len(codes["atoms"]), ATOMS + 1))
    np.put_along_axis(rows, codes["atoms"].long().numpy() % (ATOMS + 1), codes["weights"].double().numpy(), 1)
    return rows[:, :ATOMS]


@pytest.mark.parametrize("coder", [topk, lasso])
@pytest.mark.parametrize("top", [None, 2])
def test_they_are_the_normalized_codes_of_the_coder(coder: Callable[[], SparseCoder], top: int | None) -> None:
    made = coder()
    expected = made.encode(states()).codes.toarray()
    if top is not None:
        smallest = np.sort(expected, axis=1)[:, -top][:, None]
        expected = np.where(expected >= smallest, expected, 0)
    expected /= np.maximum(expected.sum(axis=1, keepdims=True), 1e-9)
    np.testing.assert_allclose(dense(StateCodes(made, top).of_states(states())), expected, atol=2e-3)


@pytest.mark.parametrize("coder", [topk, lasso])
def test_rows_without_content_are_empty(coder: Callable[[], SparseCoder]) -> None:
    content = torch.arange(40) % 3 > 0
    codes = StateCodes(coder()).of_states(states(), content)
    assert (codes["atoms"][~content] == -1).all()
    assert (codes["weights"][~content] == 0).all()
    without_state = StateCodes(coder()).of_states(states() * content[:, None])
    np.testing.assert_array_equal(dense(without_state), dense(codes))
    whole = StateCodes(coder()).of_states(states())
    np.testing.assert_array_equal(dense(codes)[content], dense(whole)[content])


@pytest.mark.parametrize("coder", [topk, lasso])
def test_the_precision_of_a_training_does_not_change_them(coder: Callable[[], SparseCoder]) -> None:
    expected = StateCodes(coder()).of_states(states())
    with torch.autocast("cpu", torch.bfloat16):
        codes = StateCodes(coder()).of_states(states())
    assert all(torch.equal(codes[name], values) for name, values in expected.items())


def test_codes_of_topk_never_wait_for_a_gpu() -> None:
    codes = StateCodes(topk(), 3)
    codes.of_states(states())  # the first batch
    hidden = torch.empty(7, DIM, device="meta")  # nothing can read its values
    content = torch.empty(7, dtype=torch.bool, device="meta")
    assert {name: part.shape for name, part in codes.of_states(hidden, content).items()} == {
        "atoms": (7, 3),
        "weights": (7, 3),
    }


def test_states_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(ValueError, match="codes must be finite"):
        StateCodes(topk()).of_states(states() * torch.nan)
