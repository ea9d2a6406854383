"""The bench of feature recovery: its figures against slow loops, and the data against what it promises."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from tests.conftest import REPOSITORY

BENCH = str(REPOSITORY / "scripts" / "bench")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The bench as a module; its folder is on the path, as it is for a script."""
    sys.path.insert(0, BENCH)
    yield importlib.import_module("feature_recovery")
    sys.path.remove(BENCH)


@pytest.fixture(scope="module")
def features(bench: Any) -> Any:
    recipe = bench.Recipe(features=60, dim=24, roots=4, depth=2, branching=3, correlation=0.2, rank=5)
    return bench.SyntheticFeatures(recipe, seed=3)


@pytest.fixture(scope="module")
def sample(features: Any) -> tuple[np.ndarray, np.ndarray]:
    hidden, activations = features.sample(25_000, np.random.default_rng(0))
    return hidden, activations.toarray()


def test_matched_cosine_is_that_of_the_best_permutation(bench: Any) -> None:
    rng = np.random.default_rng(0)
    for latents, count in ((4, 5), (5, 4), (3, 3)):
        ours, truth = rng.normal(size=(latents, 3)), rng.normal(size=(count, 3))
        cosine = [[abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b) for b in truth] for a in ours]
        smaller = min(latents, count)
        best = max(
            sum(cosine[i][j] for i, j in zip(rows, columns, strict=True)) / smaller
            for rows in itertools.combinations(range(latents), smaller)
            for columns in itertools.permutations(range(count), smaller)
        )
        assert bench.matched_cosine(ours, truth) == pytest.approx(best, rel=1e-9)
    shuffled = -3 * truth[[2, 0, 1]]
    assert bench.matched_cosine(shuffled, truth) == pytest.approx(1)
    assert bench.uniqueness(shuffled, truth) == 1
    assert bench.uniqueness(np.vstack([truth[:1], 2 * truth[:1], truth[1:2], truth[1:2]]), truth) == 0.5


def test_f1_is_that_of_one_token_at_a_time(bench: Any) -> None:
    rng = np.random.default_rng(1)
    ours, truth = rng.normal(size=(6, 4)), rng.normal(size=(5, 4))
    codes = np.where(rng.random((40, 6)) < 0.4, rng.random((40, 6)), 0)
    codes[:, 2] = 0  # a dead latent
    there = np.where(rng.random((40, 5)) < 0.5, rng.random((40, 5)), 0)
    scores = []
    for latent in range(6):
        similar = [abs(ours[latent] @ other) / np.linalg.norm(other) for other in truth]
        feature = similar.index(max(similar))
        hits = sum(codes[row, latent] > 0 and there[row, feature] > 0 for row in range(40))
        fires, present = sum(codes[:, latent] > 0), sum(there[:, feature] > 0)
        precision, recall = hits / max(fires, 1), hits / max(present, 1)
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    found = bench.detection_f1(ours, truth, sp.csr_matrix(codes), sp.csr_matrix(there))
    assert found == pytest.approx(sum(scores) / 6, rel=1e-12)
    perfect = bench.detection_f1(truth, truth, sp.csr_matrix(there), sp.csr_matrix(7 * there))
    assert perfect == 1


def test_hidden_states_are_sums_of_features(features: Any, sample: tuple[np.ndarray, np.ndarray]) -> None:
    hidden, activations = sample
    assert (hidden.dtype, hidden.shape) == (np.float32, (25_000, 24))
    assert activations.min() == 0
    for row in range(5):
        expected = features.bias + sum(activations[row, i] * features.vectors[i] for i in range(60))
        np.testing.assert_allclose(hidden[row], expected, rtol=1e-5, atol=1e-5)
    assert np.linalg.norm(features.bias) == pytest.approx(0.5)
    again, _ = features.sample(25_000, np.random.default_rng(0))
    np.testing.assert_array_equal(again, hidden)


def test_directions_are_spread_out(features: Any) -> None:
    assert np.linalg.norm(features.vectors, axis=1) == pytest.approx(np.ones(60))

    def overlap(vectors: np.ndarray) -> float:
        cosine = vectors @ vectors.T
        return float((cosine**2).sum() - len(cosine))

    random = np.random.default_rng(0).normal(size=(60, 24))
    random /= np.linalg.norm(random, axis=1, keepdims=True)
    smallest = 60 * 60 / 24 - 60  # Welch's bound
    assert overlap(random) > 1.3 * smallest
    assert overlap(features.vectors) == pytest.approx(smallest, rel=0.01)


def test_trees_are_obeyed(features: Any, sample: tuple[np.ndarray, np.ndarray]) -> None:
    _, activations = sample
    fires = activations > 0
    assert [len(level) for level in features.families] == [4, 12]
    assert (features.parents >= 0).sum() == 12 + 36
    for child in np.flatnonzero(features.parents >= 0):
        parent = features.parents[child]
        assert parent < child
        assert not (fires[:, child] & ~fires[:, parent]).any()
        both = fires[:, child]
        assert both.any()
        if features.deviations[parent] > 0.5:  # the larger the parent, the larger the child
            assert np.corrcoef(activations[both, child], activations[both, parent])[0, 1] > 0.3
    for level in features.families:
        for family in level:
            assert len(set(features.parents[family])) == 1
            assert fires[:, family].sum(axis=1).max() == 1


def test_frequencies_are_those_of_zipf(features: Any, sample: tuple[np.ndarray, np.ndarray]) -> None:
    wanted = features.frequencies
    assert (wanted[0], wanted[-1]) == pytest.approx((0.4, 5e-4))
    ranks = np.arange(1, 61) ** -0.5
    np.testing.assert_allclose(np.diff(wanted) / np.diff(ranks), (0.4 - 5e-4) / (1 - ranks[-1]), rtol=1e-9)
    found = (sample[1] > 0).mean(axis=0)
    alone = [i for i in range(60) if features.parents[i] < 0]
    for i in alone:  # the rows share nothing, so that this is binomial
        assert abs(found[i] - wanted[i]) < 5 * np.sqrt(wanted[i] * (1 - wanted[i]) / 25_000)
    children = [i for i in range(60) if features.parents[i] >= 0]
    assert 0.3 < (found[children] / wanted[children]).mean() < 1.3


def test_features_are_correlated(features: Any, sample: tuple[np.ndarray, np.ndarray]) -> None:
    fires = sample[1][:, :4] > 0  # roots
    covariance = features._factor[:4] @ features._factor[:4].T
    found = np.corrcoef(fires.T)
    for i, j in itertools.combinations(range(4), 2):
        if abs(covariance[i, j]) > 0.05:
            assert found[i, j] * covariance[i, j] > 0
    assert max(abs(covariance[i, j]) for i, j in itertools.combinations(range(4), 2)) > 0.05


def test_more_trees_than_features_are_refused(bench: Any) -> None:
    with pytest.raises(ValueError, match="60 features are too few for these trees"):
        bench.SyntheticFeatures(bench.Recipe(features=60), seed=1)


def test_lambda_gives_the_wanted_number_of_nonzeros(bench: Any, features: Any) -> None:
    rows = features.sample(500, np.random.default_rng(1))[0]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    atoms = features.vectors.astype(np.float32)
    for wanted in (3.0, 7.0):
        lambda_ = bench.lambda_with_l0(rows, atoms, wanted)
        assert bench.sparse_encode(rows, atoms, lambda_=lambda_).codes.nnz / 500 == pytest.approx(wanted, rel=0.03)
