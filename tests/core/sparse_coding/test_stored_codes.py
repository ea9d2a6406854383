"""Codes in the types of the store's files: rows of a shard, and rows of equal length."""

from __future__ import annotations

import re

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding.stored_codes import ShardRows, atom_dtype, padded_distributions, stored_form
from tests.core.sparse_coding.code_stores import expected_rows, random_codes


def test_rows_come_in_order_with_the_shape_of_the_shard():
    codes = random_codes(0, 4)
    rows = ShardRows(4, 40)
    rows.add(np.array([1, 2]), codes[:2], np.zeros(2))
    for wrong in ([2, 3], [3, 3], [3, 4]):
        with pytest.raises(ValueError, match="rows must ascend from 3 to at most 3"):
            rows.add(np.array(wrong), codes[:2], np.zeros(2))
    with pytest.raises(ValueError, match=re.escape("codes must have the shape (1, 40)")):
        rows.add(np.array([3]), codes[:2], np.zeros(2))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 12), n_atoms=st.sampled_from([1, 40, 2**16, 2**16 + 1]))
def test_padded_rows_hold_what_the_store_would(seed, size, n_atoms):
    codes = random_codes(seed, size, n_atoms, density=min(0.5, 4 / n_atoms))
    atoms, weights = padded_distributions(codes)
    assert (atoms.dtype, weights.dtype) == (np.int32, np.float16)
    assert atoms.shape == weights.shape == (size, max(np.diff(codes.indptr), default=0))
    dense = np.zeros((size, n_atoms), np.float32)
    rows, columns = np.nonzero(atoms >= 0)
    dense[rows, atoms[rows, columns]] = weights[rows, columns]
    np.testing.assert_array_equal(dense, expected_rows(codes))
    assert (weights[atoms < 0] == 0).all()


def test_weights_that_round_to_zero_are_left_out():
    codes = np.array([[0, 2, 0, 6], [0, 0, 0, 0], [1, 0, 1e-9, 0]], dtype=np.float32)
    atoms, weights = padded_distributions(sp.csr_matrix(codes))
    np.testing.assert_array_equal(atoms, [[1, 3], [-1, -1], [0, -1]])
    np.testing.assert_array_equal(weights, [[0.25, 0.75], [0, 0], [1, 0]])
    counts, flat_atoms, flat_weights = stored_form(sp.csr_matrix(codes))
    assert (counts.tolist(), flat_atoms.tolist(), flat_weights.tolist()) == ([2, 0, 1], [1, 3, 0], [0.25, 0.75, 1])


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_what_is_not_a_distribution_is_refused(bad):
    with pytest.raises(ValueError, match="codes must be finite and >= 0, as they become distributions"):
        stored_form(sp.csr_matrix([[0.0, bad]]))


def test_figures_are_of_the_rows_that_were_added():
    rows = ShardRows(6, 40)
    codes = random_codes(1, 4)
    rows.add(np.array([0, 3]), codes[:2], np.array([0.25, 0.5]))
    rows.add(np.array([4]), codes[2:3], np.array([0.125]))
    assert rows.has_gaps
    assert rows.figures(with_gaps=True) == {"coded_tokens": 3, "gap_sum": 0.875, "gap_max": 0.5}
    assert rows.figures(with_gaps=False) == {"coded_tokens": 3}
    rows.add(np.array([5]), codes[3:])
    assert not rows.has_gaps
    assert rows.figures(with_gaps=False) == {"coded_tokens": 4}


def test_atoms_take_two_bytes_while_they_can():
    assert [atom_dtype(number) for number in (1, 2**16, 2**16 + 1)] == [np.uint16, np.uint16, np.uint32]
