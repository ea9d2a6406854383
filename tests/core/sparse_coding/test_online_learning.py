"""Online dictionary learning, compared with the textbook update and with spams."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mlsm_plugin.core.sparse_coding import online_learning
from mlsm_plugin.core.sparse_coding.dictionary import learn_dictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows, sparse_encode
from mlsm_plugin.core.sparse_coding.online_learning import Surrogate, learn_online

LEARNING = {"num_atoms": 24, "lambda_": 0.05, "iterations": 60, "batch_size": 50, "threads": 1, "seed": 3}


@pytest.fixture(scope="module")
def hidden():
    """1,500 sparse non-negative mixtures of 24 directions in 16 dimensions."""
    rng = np.random.default_rng(0)
    truth = normalize_rows(0.5 + rng.standard_normal((24, 16)))
    weights = rng.exponential(size=(1500, 24)) * (rng.random((1500, 24)) < 0.2)
    weights[:, 0] += 1e-3
    return normalize_rows((weights @ truth + 0.02 * rng.standard_normal((1500, 16))).astype(np.float32))


def objective(hidden, atoms, lambda_=0.05):
    codes = sparse_encode(hidden, atoms, lambda_=lambda_).codes.toarray()
    return (0.5 * ((hidden - codes @ atoms) ** 2).sum(axis=1) + lambda_ * codes.sum(axis=1)).mean()


def unused(hidden, atoms):
    return len(atoms) - len(np.unique(sparse_encode(hidden, atoms, lambda_=0.05).codes.indices))


def test_held_out_objective_is_that_of_spams(hidden):
    train, held_out = hidden[:1200], hidden[1200:]
    ours, theirs = (learn_dictionary(train, **LEARNING, backend=backend) for backend in ("torch", "spams"))
    assert objective(held_out, ours) <= 1.01 * objective(held_out, theirs)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)
    assert unused(held_out, ours) == 0


@pytest.mark.parametrize("dense", [False, True])  # as on a GPU
@pytest.mark.parametrize("block", [1, 5, 64])
def test_improve_is_one_textbook_pass(monkeypatch, block, dense):
    """Mairal et al., algorithm 2: u_j = (b_j - D a_j) / A_jj + d_j, then into the unit ball."""
    monkeypatch.setattr(online_learning, "ATOMS_PER_BLOCK", block)
    rng = np.random.default_rng(1)
    dictionary = normalize_rows(rng.standard_normal((11, 6)))
    codes = rng.exponential(size=(40, 11)) * (rng.random((40, 11)) < 0.4)
    codes[:, 4] = 0  # never used: left as it is
    rows = rng.standard_normal((40, 6))
    surrogate = Surrogate(torch.from_numpy(dictionary))
    surrogate.dense = dense
    surrogate.add(rows, sp.csr_matrix(codes))
    a, b = codes.T @ codes / 40, codes.T @ rows / 40
    np.testing.assert_allclose(surrogate.a.numpy(), a, atol=1e-12)
    np.testing.assert_allclose(surrogate.b.numpy(), b, atol=1e-12)

    expected = dictionary.copy()
    for j in range(11):
        if a[j, j] > 0:
            u = (b[j] - a[j] @ expected) / a[j, j] + expected[j]
            expected[j] = u / max(1, np.linalg.norm(u))
    improved = torch.from_numpy(dictionary.copy())
    surrogate.improve(improved)
    np.testing.assert_allclose(improved.numpy(), expected, atol=1e-12)


def test_later_batches_weigh_more_the_longer_it_takes(monkeypatch):
    monkeypatch.setattr(online_learning, "USES_TO_KEEP", 3)
    one = sp.csr_matrix(np.ones((3, 1)))  # three uses of the only atom
    surrogate = Surrogate(torch.ones(1, 1, dtype=torch.float64))
    expected, rho = 0.0, []
    for t in range(1, 15):
        rho.append(min(max(t - 1, 1), 10))
        expected = (1 - 1 / t) ** rho[-1] * expected + 1.0  # beta A + mean of a a^T
        surrogate.add(np.ones((3, 1)), one)
        np.testing.assert_allclose(surrogate.a.item() / surrogate.weight, expected)
    assert rho[:4] == [1, 1, 2, 3]
    assert rho[-1] == 10


def test_atoms_that_nothing_uses_are_drawn_anew(hidden, monkeypatch):
    monkeypatch.setattr(online_learning, "UNUSED_ROWS_PER_ATOM", 5)
    hidden = np.pad(hidden, ((0, 0), (0, 4)))
    initial = np.concatenate([hidden[:20], np.eye(20, dtype=np.float32)[-4:]])  # the last see nothing of the rows
    arguments = {"lambda_": 0.05, "iterations": 30, "batch_size": 50, "threads": 1}
    learned = learn_online(hidden, initial, rng=np.random.default_rng(0), **arguments)
    assert unused(hidden, normalize_rows(learned)) == 0
    monkeypatch.setattr(online_learning, "UNUSED_ROWS_PER_ATOM", 10**9)
    learned = learn_online(hidden, initial, rng=np.random.default_rng(0), **arguments)
    assert unused(hidden, normalize_rows(learned)) > 0


def test_atoms_that_are_drawn_anew_differ(hidden, monkeypatch):
    monkeypatch.setattr(online_learning, "UNUSED_ROWS_PER_ATOM", 1)
    rows = np.repeat(hidden[:20], 3, axis=0)  # with equal rows, such as those of word vectors
    initial = np.concatenate([hidden[:3], np.eye(16, dtype=np.float32)])  # the first are rows, which use them
    learned = learn_online(
        rows, initial, lambda_=0.99, iterations=1, batch_size=60, rng=np.random.default_rng(0), threads=1
    )
    drawn = ~(learned[3:] == initial[3:]).all(axis=1)
    assert drawn.all()  # 16 of the 17 other rows
    assert len(np.unique(learned.round(5), axis=0)) == 19


def test_a_lambda_that_empties_all_codes_leaves_a_dictionary(hidden):
    learned = learn_dictionary(hidden, **{**LEARNING, "lambda_": 5.0}, backend="torch")
    np.testing.assert_allclose(np.linalg.norm(learned, axis=1), 1, atol=1e-6)


def test_unknown_backend(hidden):
    with pytest.raises(ValueError, match="unknown backend 'sklearn'; choose one of torch, spams"):
        learn_dictionary(hidden, **LEARNING, backend="sklearn")
