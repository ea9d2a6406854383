"""The atoms that are kept, compared with sorting each row by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mlsm_plugin.core.sparse_coding.stored_codes import (
    check_top,
    padded_distributions,
    strongest,
    strongest_of_padded,
    without_negative_codes,
)

DENSE = npst.arrays(np.float32, (4, 9), elements=st.sampled_from([0, 0, 0.25, 0.5, 1, 2]))


def kept_by_hand(dense: np.ndarray, scores: np.ndarray, top: int) -> np.ndarray:
    wanted = np.zeros_like(dense)
    for row in range(len(dense)):
        atoms = [atom for atom in range(dense.shape[1]) if dense[row, atom] > 0]
        for atom in sorted(atoms, key=lambda atom: (-scores[row, atom], atom))[:top]:
            wanted[row, atom] = dense[row, atom]
    return wanted


@given(dense=DENSE, top=st.integers(1, 10))
def test_the_strongest_are_kept(dense: np.ndarray, top: int) -> None:
    found = strongest(sp.csr_matrix(dense), top)
    assert found.has_sorted_indices
    assert np.array_equal(found.toarray(), kept_by_hand(dense, dense, top))


@given(dense=DENSE, top=st.integers(1, 10))
def test_stored_codes_are_selected_alike(dense: np.ndarray, top: int) -> None:
    codes = sp.csr_matrix(dense)
    atoms, weights = strongest_of_padded(*padded_distributions(codes), top)
    wanted_atoms, wanted_weights = padded_distributions(strongest(codes, top))
    found, wanted = np.zeros((2, *dense.shape))
    for target, own_atoms, own_weights in ((found, atoms, weights), (wanted, wanted_atoms, wanted_weights)):
        for row in range(len(dense)):
            for atom, weight in zip(own_atoms[row], own_weights[row], strict=True):
                if atom >= 0:
                    target[row, atom] += weight
    assert np.allclose(found, wanted, atol=1e-3)  # rounded to float16 once more


@given(dense=npst.arrays(np.float32, (5, 4), elements=st.sampled_from([0, 0, 1, 2, -1])))
def test_codes_with_a_negative_weight_are_empty(dense: np.ndarray) -> None:
    wanted = dense.copy()
    wanted[(dense < 0).any(axis=1)] = 0
    assert np.array_equal(without_negative_codes(sp.csr_matrix(dense)).toarray(), wanted)


def test_without_a_number_all_are_kept() -> None:
    codes = sp.csr_matrix(np.eye(3, dtype=np.float32))
    assert strongest(codes, None) is codes
    check_top(None)
    with pytest.raises(ValueError, match="--latent-top must be at least 1, got 0"):
        check_top(0)
