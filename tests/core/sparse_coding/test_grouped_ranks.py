"""Ranks within groups, against sorting each group by itself."""

from __future__ import annotations

import numpy as np

from mlsm_plugin.core.sparse_coding.grouped_ranks import ranks_in_groups, scattered


def test_ranks_are_those_of_each_group_by_itself() -> None:
    rng = np.random.default_rng(1)
    colours = rng.integers(4, size=200)
    shapes = rng.integers(3, size=200)
    first_key = rng.integers(5, size=200)
    second_key = rng.permutation(200)
    ranks = ranks_in_groups((colours, shapes), (-first_key, second_key))
    for colour in range(4):
        for shape in range(3):
            rows = np.flatnonzero((colours == colour) & (shapes == shape)).tolist()
            expected = sorted(rows, key=lambda row: (-first_key[row], second_key[row]))
            assert sorted(rows, key=lambda row: ranks[row]) == expected
            assert sorted(ranks[rows].tolist()) == list(range(len(rows)))


def test_no_elements() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert ranks_in_groups((nothing,), (nothing,)).shape == (0,)


def test_scattered_numbers_are_distinct_and_out_of_order() -> None:
    hashes = scattered(np.arange(10_000))
    assert len(np.unique(hashes)) == 10_000
    first_half = np.argsort(hashes)[:5_000]
    assert 0.45 < (first_half < 5_000).mean() < 0.55
