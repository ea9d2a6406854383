"""The place of each element among the elements of its group."""

import numpy as np


def ranks_in_groups(groups: tuple[np.ndarray, ...], by: tuple[np.ndarray, ...]) -> np.ndarray:
    """The place of each element in its group (equal in all ``groups``), sorted by the keys ``by``, first key first.

    All arrays are ``(n,)``, as is the result, int64 from 0.
    """
    order = np.lexsort((*reversed(by), *groups))
    positions = np.arange(len(order))
    begins = np.zeros(len(order), dtype=bool)
    for group in groups:
        begins[1:] |= group[order][1:] != group[order][:-1]
    ranks = np.empty_like(positions)
    ranks[order] = positions - np.maximum.accumulate(np.where(begins, positions, 0))
    return ranks


def scattered(numbers: np.ndarray) -> np.ndarray:
    """A hash of each whole number from 0, uint64: sorting by it gives an order that is as good as random."""
    hashes = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return hashes ^ (hashes >> np.uint64(29))
