"""What tests of sparse coding share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads


@pytest.fixture
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield
