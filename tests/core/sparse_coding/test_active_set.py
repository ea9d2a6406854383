"""Both forms of the active-set solver, compared with projected coordinate descent to machine precision."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding import active_set, active_set_torch
from mlsm_plugin.core.sparse_coding.encode import sparse_encode, target_distribution


def solve_with_active_set(hidden, atoms, lambda_, threads=1):
    return active_set.solve_with_active_set(torch.tensor(hidden), atoms, lambda_, threads)


def solve_batched(hidden, atoms, lambda_, threads=1):
    return active_set_torch.solve_batched(torch.tensor(hidden), atoms, lambda_)


FORMS = [solve_with_active_set, solve_batched]


def unit_rows(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def problem(seed, n_tokens, n_atoms, dim, correlation, scale=1.0):
    """Rows that are sums of atoms plus noise; the atoms share a direction."""
    rng = np.random.default_rng(seed)
    atoms = unit_rows(correlation * rng.standard_normal(dim) + (1 - correlation) * rng.standard_normal((n_atoms, dim)))
    mixture = rng.exponential(size=(n_tokens, n_atoms)) * (rng.random((n_tokens, n_atoms)) < 0.2)
    return scale * unit_rows(mixture @ atoms + 0.3 * rng.standard_normal((n_tokens, dim))), atoms


def exact_gap(hidden, atoms, codes, lambda_):
    """The relative duality gap in extended precision: weights that cancel leave few digits of a float64 residual."""
    hidden, atoms, codes = (part.astype(np.longdouble) for part in (hidden, atoms, codes))
    residual = hidden - codes @ atoms
    scale = lambda_ / np.maximum((residual @ atoms.T).max(axis=1), lambda_)
    squared = (residual**2).sum(axis=1)
    primal = 0.5 * squared + lambda_ * codes.sum(axis=1)
    dual = scale * (hidden * residual).sum(axis=1) - 0.5 * scale**2 * squared
    return ((primal - dual) / primal).astype(np.float64)


def coordinate_descent(hidden, atoms, lambda_, sweeps=20_000, least=1e-16):
    """Projected coordinate descent in float64 until no weight moves any more, by ``least`` of the largest one."""
    codes = np.zeros((len(hidden), len(atoms)))
    squared = (atoms**2).sum(axis=1)
    gram, correlations = atoms @ atoms.T, hidden @ atoms.T
    gradient = correlations.copy()
    for _ in range(sweeps):
        moved = 0.0
        for j in np.flatnonzero(squared):
            change = np.maximum(-codes[:, j], (gradient[:, j] - lambda_) / squared[j])
            codes[:, j] += change
            gradient -= change[:, None] * gram[j]
            moved = max(moved, abs(change).max())
        if moved <= least * np.abs(codes).max(initial=1e-300):
            break
    return codes


def check_optimality(hidden, atoms, codes, lambda_, slack=1e-5):
    """No atom's inner product with the residual is above lambda, and those of the support equal it."""
    correlations = (hidden - codes @ atoms) @ atoms.T
    assert (codes >= 0).all()
    assert (correlations <= lambda_ * (1 + slack)).all()
    assert (np.abs(correlations - lambda_)[codes > 0] <= lambda_ * slack).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_tokens=st.integers(1, 5),
    n_atoms=st.integers(1, 90),
    dim=st.integers(2, 24),
    correlation=st.sampled_from([0.0, 0.5, 0.8]),
    lambda_=st.sampled_from([1e-5, 1e-3, 0.01, 0.05, 0.3, 0.999, 5.0]),
)
@example(seed=1105, n_tokens=2, n_atoms=16, dim=8, correlation=0.0, lambda_=1e-5)  # weights of 800 that cancel
@pytest.mark.slow
def test_meets_the_optimality_conditions_and_the_oracle(seed, n_tokens, n_atoms, dim, correlation, lambda_):
    hidden, atoms = problem(seed, n_tokens, n_atoms, dim, correlation)

    def objective(codes):
        return 0.5 * ((hidden - codes @ atoms) ** 2).sum(1) + lambda_ * codes.sum(1)

    best = objective(coordinate_descent(hidden, atoms, lambda_, sweeps=2000, least=1e-10))
    for solve in FORMS:
        codes, gap = solve(hidden, atoms, lambda_)
        codes = codes.toarray()
        check_optimality(hidden, atoms, codes, lambda_)
        assert codes.shape == (n_tokens, n_atoms)
        # the certificate is that of an independent computation
        np.testing.assert_allclose(gap, exact_gap(hidden, atoms, codes, lambda_), atol=1e-9)
        assert (gap <= 1e-5).all()
        assert (objective(codes) <= best * (1 + 2e-6)).all()


@pytest.mark.parametrize("solve", FORMS)
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_equals_the_oracle_weight_for_weight(solve, correlation):
    hidden, atoms = problem(5, 20, 30, 40, correlation)  # fewer atoms than dimensions: the minimizer is unique
    codes, _ = solve(hidden, atoms, 0.02)
    np.testing.assert_allclose(codes.toarray(), coordinate_descent(hidden, atoms, 0.02), atol=1e-9)


@pytest.mark.parametrize("solve", FORMS)
@pytest.mark.parametrize(
    ("scale", "atom_scale"), [(1e-6, 1.0), (1e6, 1.0), (1.0, 1e-4), (1.0, 1e4)], ids=["faint", "loud", "short", "long"]
)
def test_any_scale(solve, scale, atom_scale):
    hidden, atoms = problem(1, 10, 60, 16, 0.5)
    lambda_ = 0.05
    expected = solve(hidden, atoms, lambda_)[0].toarray()
    scaled, _ = solve(scale * hidden, atom_scale * atoms, lambda_ * scale * atom_scale)
    np.testing.assert_allclose(scaled.toarray() * atom_scale / scale, expected, atol=1e-6)


@pytest.mark.parametrize("solve", FORMS)
def test_duplicate_zero_and_dependent_atoms(solve):
    rng = np.random.default_rng(0)
    hidden, atoms = problem(2, 40, 30, 6, 0.3)
    atoms[7] = 0
    atoms[20:24] = atoms[3]
    atoms[25] = unit_rows((atoms[1] + atoms[2])[None])[0]
    codes, gap = solve(hidden, atoms, 0.01)
    assert codes[:, 7].nnz == 0
    certified = gap <= 1e-6
    assert certified.mean() > 0.9
    check_optimality(hidden[certified], atoms, codes.toarray()[certified], 0.01)
    hidden = np.concatenate([hidden, rng.standard_normal((5, 6)) * 0])
    repaired = sparse_encode(hidden, atoms, lambda_=0.01)
    assert (repaired.gap <= 1e-6).all()
    assert repaired.codes[-5:].nnz == 0


def test_small_working_sets_reach_the_same_codes(monkeypatch):
    hidden, atoms = problem(3, 60, 700, 24, 0.7)
    expected, _ = solve_with_active_set(hidden, atoms, 0.02)
    monkeypatch.setattr(active_set, "GRAM_ENTRIES", 0)  # and the Gram rows computed where they are needed
    active_set._prepared.cache_clear()
    without_gram, gap = solve_with_active_set(hidden, atoms, 0.02, threads=3)
    active_set._prepared.cache_clear()
    assert abs(expected - without_gram).max() < 1e-7
    monkeypatch.undo()
    assert abs(expected - solve_batched(hidden, atoms, 0.02)[0]).max() < 1e-6
    assert (gap < 1e-5).all()
    batched, _ = solve_batched(hidden, atoms, 0.02)
    assert abs(expected - batched).max() < 1e-6
    check_optimality(hidden, atoms, expected.toarray(), 0.02)


def test_batches_of_any_size_give_the_same_codes(monkeypatch):
    hidden, atoms = problem(4, 50, 300, 16, 0.5)
    whole = [solve(hidden, atoms, 0.03)[0] for solve in FORMS]
    monkeypatch.setattr(active_set, "DENSE_ENTRIES", 7 * 300)
    monkeypatch.setitem(active_set_torch.ENTRIES, "cpu", 7 * 300)  # also less than the Gram blocks of 7 rows
    monkeypatch.setattr(active_set, "ROWS_PER_TASK", 3)
    for solve, expected in zip(FORMS, whole, strict=True):
        codes, gap = solve(hidden, atoms, 0.03, threads=2)
        assert len(gap) == 50
        assert abs(codes - expected).max() < 1e-9


def test_a_changed_dictionary_is_prepared_anew():
    hidden, atoms = problem(6, 10, 40, 8, 0.5)
    first, _ = solve_with_active_set(hidden, atoms, 0.02)
    atoms[:] = atoms[::-1].copy()  # the same array, other values
    second, _ = solve_with_active_set(hidden, atoms, 0.02)
    np.testing.assert_allclose(second.toarray(), first.toarray()[:, ::-1], atol=1e-9)


def test_without_numba_the_batched_form_takes_over(monkeypatch, caplog):
    hidden, atoms = problem(7, 10, 40, 8, 0.5)
    expected = target_distribution(sparse_encode(hidden, atoms, lambda_=0.05).codes)
    monkeypatch.setitem(sys.modules, "mlsm_plugin.core.sparse_coding.active_set_kernel", None)  # importing it now fails
    active_set.compiler_is_there.cache_clear()
    with caplog.at_level(logging.WARNING):
        result = sparse_encode(hidden, atoms, lambda_=0.05)
    active_set.compiler_is_there.cache_clear()
    assert "coding will be several times slower, as numba cannot be used" in caplog.text
    assert abs(target_distribution(result.codes) - expected).max() < 1e-5
    assert (result.gap < 1e-9).all()


@pytest.mark.slow
def test_the_compiler_is_loaded_when_needed_and_compiles_where_nothing_can_be_cached():
    code = (
        "import sys, mlsm_plugin.core.sparse_coding.encode; assert 'numba' not in sys.modules;"
        "import numpy as np; from mlsm_plugin.core.sparse_coding import active_set_kernel as kernel;"
        "assert kernel.inner(np.ones(3), np.ones(3)) == 3"
    )
    nowhere = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "NoSuchPlace"}
    subprocess.run([sys.executable, "-c", code], check=True, env=nowhere)
