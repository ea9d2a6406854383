"""The lasso as a coder: its codes are those of the solver, and what it says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mlsm_plugin.core.sparse_coding import lasso
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import SOLVERS, normalize_rows, sparse_encode
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder, LassoOptions
from mlsm_plugin.core.sparse_coding.sparse_coder import SparseCodes


def unit_rows(seed: int, rows: int, dim: int) -> np.ndarray:
    return normalize_rows(np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32))


def coder_of(atoms: np.ndarray, meta: dict[str, Any] | None = None, **options: Any) -> LassoCoder:
    return LassoCoder(AtomDictionary(atoms, {"lambda": 0.05} if meta is None else meta), LassoOptions(**options))


def assert_same_bits(found: SparseCodes, expected: SparseCodes) -> None:
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(found.codes, name), getattr(expected.codes, name))
    np.testing.assert_array_equal(found.gap, expected.gap)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 6),
    num_atoms=st.integers(1, 12),
    dim=st.integers(1, 8),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    lambda_=st.sampled_from([1e-2, 0.1, 0.7]),
    solver=st.sampled_from(SOLVERS),
)
def test_codes_are_those_of_the_solver_on_normalized_rows(
    seed: int, tokens: int, num_atoms: int, dim: int, dtype: Any, lambda_: float, solver: str
) -> None:
    atoms = unit_rows(seed, num_atoms, dim)
    hidden = (30 * np.random.default_rng(seed + 1).standard_normal((tokens, dim))).astype(dtype)
    hidden[:1] = 0
    coder = coder_of(atoms, lambda_=lambda_, solver=solver, tolerance=1e-6)
    assert (coder.num_atoms, coder.dim) == (num_atoms, dim)
    before = hidden.copy()
    found = coder.encode(hidden, threads=1)
    np.testing.assert_array_equal(hidden, before)
    assert found.codes.shape == (tokens, num_atoms)
    expected = sparse_encode(normalize_rows(hidden), atoms, lambda_=lambda_, solver=solver, threads=1)
    assert_same_bits(found, expected)
    assert_same_bits(coder.encode(torch.from_numpy(hidden), threads=1), expected)
    assert found.codes[:1].nnz == 0


def test_codes_do_not_depend_on_the_scale_of_a_row() -> None:
    hidden, coder = unit_rows(1, 10, 6), coder_of(unit_rows(2, 15, 6))
    codes = coder.encode(hidden).codes
    assert codes.nnz > 10
    np.testing.assert_allclose(coder.encode(1000 * hidden).codes.toarray(), codes.toarray(), atol=1e-6)


def test_lambda_of_the_options_comes_before_that_of_the_dictionary() -> None:
    atoms = unit_rows(0, 6, 4)
    assert coder_of(atoms).lambda_ == 0.05
    assert coder_of(atoms, lambda_=0.3).lambda_ == 0.3
    assert coder_of(atoms, {}, lambda_=0.3).lambda_ == 0.3
    assert LassoCoder(AtomDictionary(atoms, {"lambda": 0.05})).options == LassoOptions()
    hidden = unit_rows(1, 8, 4)
    assert coder_of(atoms, lambda_=0.3).encode(hidden).codes.nnz < coder_of(atoms).encode(hidden).codes.nnz


def test_a_dictionary_without_lambda_needs_one(tmp_path: Any) -> None:
    dictionary = AtomDictionary(unit_rows(0, 6, 4))
    with pytest.raises(ValueError, match="the dictionary does not say its lambda; pass the weight of the L1 penalty"):
        LassoCoder(dictionary)
    dictionary.save(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} does not say its lambda; pass --lambda"):
        LassoCoder.load(tmp_path, LassoOptions())
    assert LassoCoder.load(tmp_path, LassoOptions(lambda_=0.1)).lambda_ == 0.1
    with pytest.raises(ValueError, match="lambda_ must be a positive number, got -1"):
        LassoCoder(AtomDictionary(unit_rows(0, 6, 4), {"lambda": -1}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_": 0}, "lambda_ must be positive, got 0"),
        ({"lambda_": -0.1}, "lambda_ must be positive, got -0.1"),
        ({"lambda_": float("nan")}, "lambda_ must be a finite number, got nan"),
        ({"lambda_": float("inf")}, "lambda_ must be a finite number, got inf"),
        ({"tolerance": 0.0}, "tolerance must be positive, got 0"),
        ({"solver": "ista"}, "solver must be one of auto, spams, got 'ista'"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LassoOptions(**options)


def test_settings_are_what_decides_the_codes() -> None:
    options = {"solver": "spams", "tolerance": 1e-3}
    assert coder_of(unit_rows(0, 6, 4), **options).settings() == {"lambda": 0.05, **options, "max_nonzeros": None}
    plain = {"lambda": 0.2, "solver": "auto", "tolerance": 1e-4, "max_nonzeros": None}
    assert coder_of(unit_rows(0, 6, 4), lambda_=0.2).settings() == plain


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_equal_and_zero_atoms_are_named(data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    signs = np.where(data.draw(arrays.arrays(bool, (len(places), 4))), 1, -1)
    atoms = np.eye(4)[places]
    atoms = np.where(atoms == 0, 0.0 * signs, atoms)  # zeros of both signs are equal
    coder = coder_of(atoms)
    if data.draw(st.booleans()):
        zero = data.draw(st.integers(0, len(places) - 1))
        coder.dictionary.atoms[zero] = data.draw(st.sampled_from([0.0, -0.0]))
        places[zero] = -1
    # the first atom, from the start, that is zero or that an earlier one equals
    bad = next((k for k, place in enumerate(places) if place == -1 or place in places[:k]), None)
    if bad is None:
        coder.check()
        return
    with pytest.raises(ValueError, match=f"atom {bad} |atoms \\d+ and {bad} ") as error:
        coder.check()
    if places[bad] == -1:
        assert str(error.value).startswith(f"atom {bad} of the dictionary is all zero; ")
    else:
        first = places.index(places[bad])
        assert str(error.value).startswith(f"atoms {first} and {bad} of the dictionary are identical, ")


def test_codes_above_the_tolerance_are_reported_with_what_to_change() -> None:
    coder = coder_of(unit_rows(0, 6, 4), tolerance=1e-3)
    codes = sp.csr_matrix((4, 6), dtype=np.float32)
    assert coder.inexact(SparseCodes(codes, np.array([0, 1e-3, 1e-4, 0]))) is None
    found = coder.inexact(SparseCodes(codes, np.array([2e-3, 1e-3, 0.25, 0])))
    assert found is not None
    assert found.rows.tolist() == [0, 2]
    assert found.reason == (
        "miss --tolerance 0.001: the worst relative duality gap is 0.25. Use --solver auto or a larger --tolerance of "
        "`mlsm encode`"
    )


def test_why_all_codes_are_empty() -> None:
    hidden = 7 * np.array([[0.6, 0.8, 0.0], [0.0, 0.0, -1.0]])
    coder = coder_of(np.eye(3), lambda_=0.9)
    assert coder.encode(hidden).codes.nnz == 0
    reason = "lambda 0.9 is too large: the largest correlation of a hidden state with an atom is 0.8,"
    assert coder.why_empty(hidden).startswith(reason)
    assert coder.why_empty(torch.from_numpy(hidden)) == coder.why_empty(hidden)
    assert coder_of(np.eye(3), lambda_=0.79).encode(hidden).codes.nnz == 1


def test_the_largest_correlation_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, coder = unit_rows(3, 11, 5), coder_of(unit_rows(4, 7, 5))
    largest = (hidden @ coder.dictionary.atoms.T).max()
    for entries in (1, 7, 30, 1000):
        monkeypatch.setattr(lasso, "DENSE_ENTRIES", entries)
        for rows in (hidden, torch.from_numpy(hidden)):
            assert f"with an atom is {largest:.4g}, and" in coder.why_empty(rows)


def test_bfloat16_is_coded_and_reconstructed() -> None:
    coder = coder_of(unit_rows(1, 6, 4))
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes = coder.encode(hidden).codes
    np.testing.assert_allclose(coder.reconstruct(hidden, codes), coder.reconstruct(hidden.float(), codes))
