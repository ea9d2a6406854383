"""A matrix of any origin as a dictionary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding.formats.any_format import read_npy_matrix

ATOMS = np.random.default_rng(0).normal(size=(12, 5))
UNIT = ATOMS / np.sqrt((ATOMS**2).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_are_atoms(dtype: type, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", UNIT.astype(dtype))
    found = read_npy_matrix(tmp_path / "a.npy", lambda_=0.1)
    assert np.array_equal(found.atoms, UNIT.astype(dtype).astype(np.float32))
    assert found.meta == {
        **{"kind": "lasso", "n_atoms": 12, "dim": 5, "lambda": 0.1},
        "imported_from": {"format": "npy", "file": "a.npy"},
    }


@pytest.mark.parametrize("transpose", [False, True])
def test_rows_are_scaled_and_the_matrix_turned_where_that_is_asked_for(transpose: bool, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(ATOMS.T) if transpose else ATOMS)
    found = read_npy_matrix(tmp_path / "a.npy", normalize=True, transpose=transpose)
    assert np.allclose(found.atoms, UNIT, atol=1e-6)
    assert "lambda" not in found.meta


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (ATOMS, r"row \d+ has the norm [\d.]+, but atoms have unit norm; pass --normalize"),
        (UNIT.T, "its columns have, so pass --transpose"),
        (UNIT[0], r"must be a matrix .* of the shape \(5,\)"),
        (np.zeros((0, 5)), r"of the shape \(0, 5\)"),
        (UNIT * 1j, "complex128"),
        (np.array([["a"]]), "real numbers"),
        (np.full((2, 2), np.nan), "holds NaN"),
        (np.full((2, 2), 1e300), "beyond float32"),
        (np.eye(3) * [1, 0, 1], "atom 1 is zero"),
    ],
)
def test_what_is_no_dictionary(array: np.ndarray, problem: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=problem) as caught, np.errstate(all="ignore"):
        read_npy_matrix(tmp_path / "a.npy")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("lambda_", [0, -1, float("nan"), float("inf")])
def test_lambda_must_be_positive(lambda_: float, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", UNIT)
    with pytest.raises(ValueError, match="--lambda must be a positive number"):
        read_npy_matrix(tmp_path / "a.npy", lambda_=lambda_)
