"""Arrays as keys of a cache."""

from __future__ import annotations

import functools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mlsm_plugin.core.sparse_coding.active_set_torch import ArrayContents

VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e300, 1e-300])
ARRAYS = arrays.arrays(np.float64, arrays.array_shapes(min_dims=2, max_dims=2, max_side=2), elements=VALUES)


@given(ARRAYS, ARRAYS)
def test_keys_are_equal_where_values_are(one: np.ndarray, other: np.ndarray) -> None:
    first, second = ArrayContents(one), ArrayContents(other)
    assert (first == second) == (one.tolist() == other.tolist())
    assert first != second or hash(first) == hash(second)
    assert first == ArrayContents(one.copy(order="F"))
    assert hash(first) == hash(ArrayContents(one.copy(order="F")))
    assert first != one.tolist()


def test_a_cache_notices_an_array_that_was_changed_in_place() -> None:
    calls = []

    @functools.lru_cache(maxsize=1)
    def total(contents: ArrayContents) -> float:
        calls.append(1)
        return float(contents.array.sum())

    array = np.arange(6.0).reshape(3, 2)
    assert total(ArrayContents(array)) == total(ArrayContents(array.copy())) == 15
    assert len(calls) == 1
    array[2, 1] = 100  # not in the first row, which alone decides the hash
    assert total(ArrayContents(array)) == 110
    assert len(calls) == 2
