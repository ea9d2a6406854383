"""Whether a batch has padding."""

from __future__ import annotations

import numpy as np
import pytest

from mlsm_plugin.fairseq_plugin.data.token_datasets import BatchPaddingDataset


@pytest.mark.parametrize(("batch", "expected"), [([0], False), ([0, 2], False), ([0, 1], True), ([1, 0, 2], True)])
def test_batch_has_padding_if_lengths_differ(batch: list[int], expected: bool) -> None:
    dataset = BatchPaddingDataset(np.array([7, 3, 7]))
    assert len(dataset) == 3
    found = dataset.collater([dataset[index] for index in batch])
    assert found is expected
