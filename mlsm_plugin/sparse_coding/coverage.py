"""Choose which positions of a split are coded if only a share of them is; depends only on seed and position."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

# position of a token that has no row in the code store, such as a prepended BOS or padding
NO_POSITION = -1


def recorded_coverage(meta: Mapping[str, Any], directory: str | os.PathLike[str]) -> tuple[float, int]:
    """The share of the positions that a code store covers, and its seed, from its ``meta.json``.

    Raises:
        ValueError: the share is below 1, and its seed is missing.
    """
    coverage, seed = float(meta.get("coverage", 1.0)), meta.get("coverage_seed")
    if coverage < 1 and seed is None:
        raise ValueError(f"{directory}/meta.json gives the coverage {coverage} but no coverage_seed; encode again")
    return coverage, int(seed or 0)


def covered_positions(positions: np.ndarray, *, coverage: float, seed: int) -> np.ndarray:
    """Tell for each position whether it belongs to the seeded share.

    A hash of (seed, position) decides for each position independently (SplitMix64: Steele, Lea and Flood, 2014). The
    choice therefore does not depend on shards or ranks, and with the same seed, a larger coverage contains a smaller
    one.

    Args:
        positions: (n,) int, flat token positions of a split; negative ones (no position) are never covered.
        coverage: expected share of the positions, in (0, 1]; 1 covers all.
        seed: any integer in [0, 2^63).

    Returns:
        (n,) bool.

    Raises:
        ValueError: ``coverage`` or ``seed`` is out of range.
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be in (0, 1], got {coverage}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2^63), got {seed}")
    positions = np.asarray(positions)
    if coverage == 1:
        return positions >= 0
    state = positions.astype(np.uint64) + _mix(np.array([seed], np.uint64))
    return (_mix(state) < np.uint64(int(coverage * 2.0**64))) & (positions >= 0)


def _mix(state: np.ndarray) -> np.ndarray:
    """One output of SplitMix64 for each state (uint64; overflow is intended)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
