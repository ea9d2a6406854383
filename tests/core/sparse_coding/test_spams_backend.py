"""spams leaves torch its threads, although it sets those of the whole process."""

from __future__ import annotations

import numpy as np
import pytest
import spams
import torch

from mlsm_plugin.core.sparse_coding.spams_backend import learn_with_spams, solve_with_spams


@pytest.mark.usefixtures("one_thread")
def test_spams_leaves_torch_its_threads() -> None:
    rng = np.random.default_rng(0)
    hidden, atoms = (rng.standard_normal((rows, 5)) for rows in (40, 8))
    codes, gaps = solve_with_spams(hidden, atoms, 0.1, threads=2)
    assert (codes.shape, gaps.shape) == ((40, 8), (40,))
    assert gaps.max() < 1e-9
    assert torch.get_num_threads() == 1
    parts = iter([hidden.astype(np.float32)])
    learned = learn_with_spams(
        parts, atoms.astype(np.float32), lambda_=0.1, iterations=2, batch_size=10, threads=2
    )  # fmt: skip
    assert learned.shape == (8, 5)
    assert torch.get_num_threads() == 1
    # without the precaution it would have two
    spams.lasso(np.asfortranarray(hidden.T), D=np.asfortranarray(atoms.T), lambda1=0.1, numThreads=2)
    assert torch.get_num_threads() == 2
