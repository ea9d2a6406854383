"""Vectors of texts, their errors, and the directions that a narrow model learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.losses.sentence_vectors import leading_directions, pooled_vectors, share_kept, vector_errors


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    dim=st.integers(1, 4),
    pooling=st.sampled_from(["mean", "cls"]),
)
def test_vectors_are_those_of_each_text_alone(lengths: list[int], dim: int, pooling: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(len(lengths), 5, dim)
    attended = torch.arange(5) < torch.tensor(lengths)[:, None]
    hidden[~attended] = float("nan") if pooling == "cls" else 9.0
    vectors = pooled_vectors(hidden, attended, pooling)
    for row, length in enumerate(lengths):
        states = hidden[row, :length].double()
        alone = torch.zeros(dim).double() if length == 0 else states[0] if pooling == "cls" else states.mean(dim=0)
        torch.testing.assert_close(vectors[row].double(), alone)


def test_a_text_without_a_vector_has_no_error() -> None:
    predicted = torch.randn(3, 4, requires_grad=True)
    vectors = torch.randn(3, 4).half()
    vectors[1] = 0
    errors = vector_errors(predicted, vectors)
    expected = (predicted.detach().double() - vectors.double()).square().mean(dim=1)
    expected[1] = 0
    assert errors.dtype == torch.float32
    torch.testing.assert_close(errors.double(), expected)
    errors.sum().backward()
    assert predicted.grad is not None
    assert predicted.grad[1].abs().sum() == 0


@settings(max_examples=30, deadline=None)
@given(number=st.integers(1, 2500), dim=st.integers(1, 12), data=st.data())
def test_leading_directions_are_those_of_a_singular_value_decomposition(
    number: int, dim: int, data: st.DataObject
) -> None:
    width = data.draw(st.integers(1, dim))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    scales = 2.0 ** -np.arange(dim)
    vectors = (generator.normal(size=(number, dim)) * scales).astype(np.float32)
    directions = leading_directions(vectors, width)
    kept = share_kept(vectors, directions)
    assert (directions.dtype, directions.shape) == (np.float32, (dim, width))
    np.testing.assert_allclose(directions.T @ directions, np.eye(width), atol=1e-5)
    reduced = vectors @ directions
    lengths = np.linalg.svd(vectors.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(np.square(reduced).sum(), np.square(lengths[:width]).sum(), rtol=1e-4)
    assert kept == pytest.approx(np.square(lengths[:width]).sum() / np.square(lengths).sum(), rel=1e-6)


def test_zero_vectors_have_directions() -> None:
    zeros = np.zeros((3, 4), np.float32)
    directions = leading_directions(zeros, 2)
    assert share_kept(zeros, directions) == 1
    np.testing.assert_allclose(directions.T @ directions, np.eye(2), atol=1e-6)


@pytest.mark.parametrize(
    ("vectors", "width", "problem"),
    [
        (np.ones((3, 4)), 0, "have no 0 directions"),
        (np.ones((3, 4)), -1, "have no -1 directions"),
        (np.ones((3, 4)), 5, "have no 5 directions"),
        (np.ones((0, 4)), 2, "have no 2 directions"),
        (np.ones(4), 2, "have no 2 directions"),
        (np.array([[1, math.nan]]), 1, "a vector is not finite"),
    ],
)
def test_vectors_without_directions_are_refused(vectors: np.ndarray, width: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        leading_directions(vectors, width)


def test_too_few_vectors_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    leading_directions(np.eye(3, 4), 3)
    assert not caplog.records
    leading_directions(np.eye(2, 4), 3)
    assert "2 vectors do not determine 3 directions" in caplog.text
