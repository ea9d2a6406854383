"""torch has as many threads as before, after an error too."""

from __future__ import annotations

import pytest
import torch

from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads

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
