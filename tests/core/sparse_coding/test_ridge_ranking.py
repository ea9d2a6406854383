"""The ranking of atoms against the residual of a ridge regression, row by row in numpy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding.active_set_torch import ridge_ranking


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 8), st.sampled_from([1e-3, 1.0, 50.0]))
def test_ranks_are_inner_products_with_the_residual_of_a_ridge_regression(
    seed: int, num_atoms: int, dim: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    atoms, x = scale * rng.standard_normal((num_atoms, dim)), rng.standard_normal(dim)
    ridge = np.linalg.eigvalsh(atoms.T @ atoms).mean()
    # the ridge regression as a least squares problem: minimize |x - D^T w|^2 + r |w|^2
    design = np.concatenate([atoms.T, np.sqrt(ridge) * np.eye(num_atoms)])
    weights = np.linalg.lstsq(design, np.concatenate([x, np.zeros(num_atoms)]), rcond=None)[0]
    expected = atoms @ (x - atoms.T @ weights)
    found = ridge_ranking(torch.from_numpy(atoms))
    assert found.shape == (num_atoms, dim)
    np.testing.assert_allclose(found.numpy() @ x, expected, rtol=1e-7, atol=1e-10 * scale)


def test_atoms_that_are_all_zero_are_ranked_too() -> None:
    assert torch.equal(ridge_ranking(torch.zeros(3, 2, dtype=torch.float64)), torch.zeros(3, 2, dtype=torch.float64))
