"""torch has as many threads as before: after an error too, and after spams, which sets those of the whole process."""

from __future__ import annotations

import numpy as np
import pytest
import spams
import torch

from mlsm_plugin.sparse_coding.dictionary import learn_dictionary
from mlsm_plugin.sparse_coding.encode import sparse_encode
from mlsm_plugin.sparse_coding.thread_counts import torch_threads

pytestmark = pytest.mark.usefixtures("one_thread")


def test_threads_are_as_before_also_after_an_error() -> None:
    with torch_threads(3):
        assert torch.get_num_threads() == 3
        with torch_threads(None):
            assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 1
    with pytest.raises(KeyError), torch_threads(2):
        raise KeyError
    assert torch.get_num_threads() == 1


def test_spams_leaves_torch_its_threads() -> None:
    rng = np.random.default_rng(0)
    hidden, atoms = (rng.standard_normal((rows, 5)).astype(np.float32) for rows in (40, 8))
    sparse_encode(hidden, atoms, lambda_=0.1, solver="spams", threads=2)
    assert torch.get_num_threads() == 1
    learn_dictionary(hidden, num_atoms=8, lambda_=0.1, iterations=2, batch_size=10, threads=2, backend="spams")
    assert torch.get_num_threads() == 1
    # without the precaution it would have two
    spams.lasso(np.asfortranarray(hidden.T), D=np.asfortranarray(atoms.T), lambda1=0.1, numThreads=2)
    assert torch.get_num_threads() == 2
