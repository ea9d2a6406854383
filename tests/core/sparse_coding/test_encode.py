"""The solvers compared with a slow oracle, the gap with the true suboptimality, and the errors."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding import active_set, encode, spams_backend
from mlsm_plugin.core.sparse_coding.active_set_torch import relative_gap_of_parts
from mlsm_plugin.core.sparse_coding.encode import normalize_rows, sparse_encode, target_distribution


def random_problem(seed: int, n_tokens: int, n_atoms: int, dim: int, correlation: float):
    """Unit rows of hidden states and of atoms that share a direction, the more so the higher ``correlation``."""
    rng = np.random.default_rng(seed)
    atoms = correlation * rng.standard_normal(dim) + (1 - correlation) * rng.standard_normal((n_atoms, dim))
    return normalize_rows(rng.standard_normal((n_tokens, dim))), normalize_rows(atoms)


def objective(hidden, dictionary, codes, lambda_):
    return 0.5 * ((hidden - codes @ dictionary) ** 2).sum(axis=1) + lambda_ * codes.sum(axis=1)


def coordinate_descent(hidden, dictionary, lambda_, sweeps=300):
    """Projected coordinate descent in float64, one scalar at a time for all rows."""
    codes = np.zeros((len(hidden), len(dictionary)))
    residual = hidden.copy()
    for _ in range(sweeps):
        for j, atom in enumerate(dictionary):
            new = np.maximum(0, codes[:, j] + (residual @ atom - lambda_) / (atom @ atom))
            residual -= np.outer(new - codes[:, j], atom)
            codes[:, j] = new
    return codes


problems = st.builds(
    random_problem,
    seed=st.integers(0, 2**32 - 1),
    n_tokens=st.integers(1, 6),
    n_atoms=st.integers(1, 12),
    dim=st.integers(2, 8),
    correlation=st.sampled_from([0.0, 0.5, 0.9]),
)
lambdas = st.sampled_from([1e-2, 0.05, 0.3, 1.5])


@pytest.mark.parametrize("solver", ["auto", "spams"])
@settings(max_examples=25, deadline=None)
@given(problem=problems, lambda_=lambdas)
def test_codes_are_optimal(solver, problem, lambda_):
    hidden, dictionary = problem
    tolerance = 1e-7
    result = sparse_encode(hidden, dictionary, lambda_=lambda_, solver=solver, threads=1)
    codes = result.codes.toarray().astype(np.float64)
    assert result.codes.dtype == np.float32
    assert result.codes.has_sorted_indices
    assert (result.codes.data > 0).all()
    assert result.gap.shape == (len(hidden),)
    assert (result.gap <= tolerance).all()

    best = objective(hidden, dictionary, coordinate_descent(hidden, dictionary, lambda_), lambda_)
    assert (objective(hidden, dictionary, codes, lambda_) <= best * (1 + 1e-6)).all()

    # KKT: no atom correlates with the residual more than lambda, and for the active ones it equals lambda.
    correlation = (hidden - codes @ dictionary) @ dictionary.T
    slack = 1e-3  # sqrt(2 * tolerance) and the rounding of the weights
    assert (correlation <= lambda_ + slack).all()
    assert (codes * np.abs(correlation - lambda_)).max(initial=0) <= slack


@settings(max_examples=40, deadline=None)
@given(problem=problems, lambda_=lambdas, seed=st.integers(0, 1000))
def test_gap_bounds_the_suboptimality_of_any_code(problem, lambda_, seed):
    hidden, dictionary = problem
    rng = np.random.default_rng(seed)
    codes = coordinate_descent(hidden, dictionary, lambda_)
    best = objective(hidden, dictionary, codes, lambda_)
    guess = np.maximum(0, codes + rng.choice([0, 1e-3, 0.3], codes.shape) * rng.standard_normal(codes.shape))
    value = objective(hidden, dictionary, guess, lambda_)
    residual = hidden - guess @ dictionary
    largest = (residual @ dictionary.T).max(axis=1)
    gap = relative_gap_of_parts(hidden, residual, largest, lambda_ * guess.sum(axis=1), lambda_)
    assert (gap * value >= value - best - 1e-12).all()
    assert ((gap >= 0) & (gap <= 1)).all()


def test_identity_dictionary_soft_thresholds():
    hidden = np.array([[0.5, 0.3, -0.8, 0.05], [0.0, 0.0, 0.0, 0.0]])
    result = sparse_encode(hidden, np.eye(4), lambda_=0.1)
    np.testing.assert_allclose(result.codes.toarray(), [[0.4, 0.2, 0, 0], [0, 0, 0, 0]], atol=1e-7)
    np.testing.assert_allclose(target_distribution(result.codes).toarray(), [[2 / 3, 1 / 3, 0, 0], [0] * 4], atol=1e-6)
    assert result.gap[1] == 0


def test_chunks_do_not_change_the_codes(monkeypatch):
    hidden, atoms = random_problem(1, 23, 12, 8, 0.5)
    for solver in ("auto", "spams"):
        whole = sparse_encode(hidden, atoms, lambda_=0.05, solver=solver, threads=1)
        with monkeypatch.context() as patch:
            patch.setattr(encode, "ROWS_PER_CHUNK", 5)
            for module in (spams_backend, active_set):
                patch.setattr(module, "DENSE_ENTRIES", 30)
            parts = sparse_encode(hidden, atoms, lambda_=0.05, solver=solver, threads=1)
        assert parts.codes.shape == whole.codes.shape
        np.testing.assert_allclose(parts.codes.toarray(), whole.codes.toarray(), atol=1e-6)


@pytest.mark.parametrize("solver", ["auto", "spams"])
def test_torch_tensors_and_readonly_memmaps(solver, tmp_path):
    hidden, atoms = random_problem(2, 7, 12, 8, 0.5)
    expected = sparse_encode(hidden, atoms, lambda_=0.05, solver=solver).codes.toarray()
    np.save(tmp_path / "hidden.npy", hidden)
    np.save(tmp_path / "atoms.npy", atoms)
    mapped = [np.load(tmp_path / name, mmap_mode="r") for name in ("hidden.npy", "atoms.npy")]
    np.testing.assert_array_equal(sparse_encode(*mapped, lambda_=0.05, solver=solver).codes.toarray(), expected)
    tensors = torch.from_numpy(hidden).requires_grad_(), torch.from_numpy(atoms)
    np.testing.assert_array_equal(sparse_encode(*tensors, lambda_=0.05, solver=solver).codes.toarray(), expected)
    rounded = torch.from_numpy(hidden).bfloat16()
    result = sparse_encode(rounded, atoms, lambda_=0.05, solver=solver).codes.toarray()
    np.testing.assert_allclose(result, expected, atol=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    hidden, atoms = random_problem(2, 300, 200, 32, 0.5)
    expected = sparse_encode(hidden, atoms, lambda_=0.05).codes.toarray()
    on_cuda = sparse_encode(torch.from_numpy(hidden).cuda(), atoms, lambda_=0.05)
    np.testing.assert_allclose(on_cuda.codes.toarray(), expected, atol=1e-5)


def test_no_tokens():
    hidden, atoms = random_problem(3, 30, 12, 8, 0.0)
    empty = sparse_encode(hidden[:0], atoms, lambda_=0.05)
    assert empty.codes.shape == (0, 12)
    assert empty.gap.shape == (0,)


def test_normalize_rows():
    rows = np.array([[3, 4], [0, 0]], dtype=np.float16)
    for normalized in (normalize_rows(rows), normalize_rows(torch.from_numpy(rows)).numpy()):
        assert normalized.dtype == np.float32
        np.testing.assert_allclose(normalized, [[0.6, 0.8], [0, 0]], rtol=1e-6)
    assert normalize_rows(rows.astype(np.float64)).dtype == np.float64


def test_target_distribution_of_stored_zeros_and_empty_rows():
    data, indices, indptr = np.array([0.0, 0.0, 3.0, 1.0]), np.array([0, 1, 0, 2]), np.array([0, 2, 2, 4])
    codes = sp.csr_matrix((data, indices, indptr), shape=(3, 3))
    np.testing.assert_allclose(target_distribution(codes).toarray(), [[0, 0, 0], [0, 0, 0], [0.75, 0, 0.25]])
    assert codes.data[2] == 3.0


HIDDEN, ATOMS = np.ones((4, 3)), np.eye(3)
NAN_ROW = np.where(np.arange(4)[:, None] == 2, np.nan, HIDDEN)


@pytest.mark.parametrize(
    ("hidden", "atoms", "options", "message"),
    [
        (HIDDEN[0], ATOMS, {}, "hidden must be 2-D (n_tokens, dim), got the shape (3,)"),
        (HIDDEN, ATOMS[0], {}, "dictionary must be 2-D (n_atoms, dim), got the shape (3,)"),
        (HIDDEN, ATOMS[:0], {}, "dictionary has no atoms; it must have at least one row"),
        (HIDDEN[:, :2], ATOMS, {}, "hidden states are 2 wide but the atoms of the dictionary are 3 wide"),
        (NAN_ROW, ATOMS, {}, "hidden row 2 holds NaN or infinity; all values must be finite"),
        (HIDDEN, np.full((3, 3), np.inf), {}, "dictionary row 0 holds NaN or infinity"),
        (HIDDEN, ATOMS, {"lambda_": 0}, "lambda_ must be a positive number, got 0"),
        (HIDDEN, ATOMS, {"lambda_": np.nan}, "lambda_ must be a positive number, got nan"),
        (HIDDEN, ATOMS, {"solver": "ista"}, "unknown solver 'ista'; choose one of auto, spams"),
        (HIDDEN, ATOMS, {"threads": 0}, "threads must be >= 1 or None, got 0"),
    ],
)
def test_errors(hidden, atoms, options, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the text is compared
        sparse_encode(hidden, atoms, **{"lambda_": 0.1, **options})
    assert message in str(error.value)
