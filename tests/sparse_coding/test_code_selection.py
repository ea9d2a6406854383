"""The atoms that are kept, compared with sorting each row by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mlsm_plugin.sparse_coding.code_selection import (
    SELECTIONS,
    CodeSelection,
    strongest_of_padded,
    without_negative_codes,
)
from mlsm_plugin.sparse_coding.stored_codes import padded_distributions

DENSE = npst.arrays(np.float32, (4, 9), elements=st.sampled_from([0, 0, 0.25, 0.5, 1, 2]))


def kept_by_hand(dense: np.ndarray, scores: np.ndarray, top: int) -> np.ndarray:
    wanted = np.zeros_like(dense)
    for row in range(len(dense)):
        atoms = [atom for atom in range(dense.shape[1]) if dense[row, atom] > 0]
        for atom in sorted(atoms, key=lambda atom: (-scores[row, atom], atom))[:top]:
            wanted[row, atom] = dense[row, atom]
    return wanted


@given(dense=DENSE, seed=st.integers(0, 99), top=st.integers(1, 10), by=st.sampled_from(SELECTIONS))
def test_the_strongest_are_kept(dense: np.ndarray, seed: int, top: int, by: str) -> None:
    rng = np.random.default_rng(seed)
    gradients, directions = rng.integers(-2, 3, (len(dense), 3)), rng.integers(-2, 3, (dense.shape[1], 3))
    codes = sp.csr_matrix(dense)
    scores = dense.astype(np.float64)
    if by != "weight":
        for row, atom in np.ndindex(*dense.shape):
            scores[row, atom] *= sum(gradients[row, i] * directions[atom, i] for i in range(3))
    if by == "absolute-attribution":
        scores = np.abs(scores)
    found = CodeSelection(top, by).select(codes, gradients, directions)
    assert found.has_sorted_indices
    assert np.array_equal(found.toarray(), kept_by_hand(dense, scores, top))


@given(dense=DENSE, top=st.integers(1, 10))
def test_stored_codes_are_selected_alike(dense: np.ndarray, top: int) -> None:
    codes = sp.csr_matrix(dense)
    atoms, weights = strongest_of_padded(*padded_distributions(codes), top)
    wanted_atoms, wanted_weights = padded_distributions(CodeSelection(top).select(codes))
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
    assert CodeSelection().select(codes) is codes
    assert CodeSelection().settings() == {}
    assert CodeSelection(2).settings() == {"latent_top": 2, "latent_select": "weight"}


@pytest.mark.parametrize(
    ("top", "by", "problem"),
    [
        (0, "weight", "--latent-top must be at least 1, got 0"),
        (3, "luck", "--latent-select must be one of weight, "),
        (None, "attribution", "--latent-select attribution needs --latent-top"),
    ],
)
def test_selections_that_mean_nothing(top: int | None, by: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CodeSelection(top, by)
