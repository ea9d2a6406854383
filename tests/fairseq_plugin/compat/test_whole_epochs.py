"""Batches hold every sample of an epoch once, whatever fairseq would leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.fairseq_plugin.compat.batches import WholeEpochsDataset


class Texts(WholeEpochsDataset):
    """Texts of which only the lengths are known."""

    def __init__(self, lengths: list[int]) -> None:
        self.sizes = np.array(lengths)

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self.sizes[indices])


def batches_of(lengths: list[int], **limits: Any) -> list[list[int]]:
    order = np.argsort(np.array(lengths, dtype=np.int64), kind="stable")
    found = [np.asarray(batch).tolist() for batch in Texts(lengths).batch_by_size(order, **limits)]
    assert [index for batch in found for index in batch] == order.tolist()
    assert all(found)
    return found


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    max_tokens=st.one_of(st.none(), st.integers(20, 90)),
    max_sentences=st.one_of(st.none(), st.integers(1, 20)),
    multiple=st.sampled_from([1, 3, 8]),
)
def test_every_sample_is_in_one_batch_in_order(
    lengths: list[int], max_tokens: int | None, max_sentences: int | None, multiple: int
) -> None:
    limits = {"max_tokens": max_tokens, "max_sentences": max_sentences, "required_batch_size_multiple": multiple}
    for batch in batches_of(lengths, **limits):
        longest = max(lengths[index] for index in batch)
        # fairseq puts fewer samples than the multiple above the limits
        assert max_sentences is None or len(batch) <= max(max_sentences, multiple)
        assert max_tokens is None or len(batch) * longest <= max_tokens or len(batch) <= multiple


def test_fewer_samples_than_the_multiple_are_a_batch() -> None:
    assert batches_of([4, 2, 3], max_sentences=16, required_batch_size_multiple=8) == [[1, 2, 0]]
    eleven = batches_of(list(range(1, 12)), max_sentences=8, required_batch_size_multiple=8)
    assert [len(batch) for batch in eleven] == [8, 3]


def test_a_sample_beyond_the_tokens_of_a_batch_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"--max-tokens 6 is too few .* has 7 tokens"):
        batches_of([4, 7, 3], max_tokens=6)
