"""Examples of atoms: against a slow search through all parts, over block and shard borders, with flat memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding import atom_examples
from mlsm_plugin.core.sparse_coding.atom_examples import (
    BARS,
    DRAWN,
    INTERVALS,
    PART,
    STRONGEST,
    AtomExamples,
    Examples,
    find_examples,
)
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from tests.core.sparse_coding.code_stores import BOUNDARIES, write_store
from tests.core.sparse_coding.code_stores import random_codes as random_store_codes

NUM_ATOMS = 7
NEVER = 5  # an atom that does not occur


class DenseStore:
    """Codes in memory, with the methods of a store that are used."""

    def __init__(self, dense: np.ndarray) -> None:
        self.dense = dense.astype(np.float16)
        self.num_tokens, self.num_atoms = dense.shape
        self.longest_lookup = 0

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.longest_lookup = max(self.longest_lookup, len(positions))
        weights = self.dense[positions]
        return np.where(weights > 0, np.arange(self.num_atoms), -1), weights


def random_codes(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    dense = rng.random((num_tokens, NUM_ATOMS)) * (rng.random((num_tokens, NUM_ATOMS)) < 0.05)
    dense[:, NEVER] = 0
    return dense


def parts_of(starts: np.ndarray) -> list[tuple[int, int]]:
    parts = []
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        number = -(-(stop - start) // PART)
        edges = [start + place * (stop - start) // number for place in range(number + 1) if number]
        parts += list(itertools.pairwise(edges))
    return parts


def rows_of(examples: Examples, atom: int) -> list[tuple[float, int, int]]:
    rows = np.flatnonzero(examples.atoms == atom)
    return [(float(examples.weights[row]), int(examples.starts[row]), int(examples.stops[row])) for row in rows]


@pytest.fixture(scope="module")
def text() -> tuple[DenseStore, np.ndarray]:
    rng = np.random.default_rng(3)
    lengths = [1, 128, 129, 700, 0, *rng.integers(1, 60, size=120).tolist()]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return DenseStore(random_codes(rng, int(starts[-1]))), starts


def found(store: DenseStore, starts: np.ndarray) -> AtomExamples:
    return find_examples(store, starts)  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [64, 500, 1 << 16])
def test_the_examples_are_those_of_a_slow_search(
    text: tuple[DenseStore, np.ndarray], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    store, starts = text
    monkeypatch.setattr(atom_examples, "TOKENS_AT_ONCE", at_once)
    result = found(store, starts)
    parts = parts_of(starts)
    assert result.parts == len(parts)
    assert max(stop - start for start, stop in parts) <= PART
    dense = store.dense.astype(np.float32)
    np.testing.assert_array_equal(result.occurrences, (dense > 0).sum(axis=0))
    np.testing.assert_array_equal(result.largest, dense.max(axis=0))
    for atom in range(NUM_ATOMS):
        occurring = [(float(dense[start:stop, atom].max()), start, stop) for start, stop in parts]
        occurring = [part for part in occurring if part[0] > 0]
        strongest = sorted(occurring, key=lambda part: (-part[0], part[1]))[:STRONGEST]
        assert rows_of(result.strongest, atom) == strongest
        drawn = rows_of(result.drawn, atom)
        assert set(drawn) <= set(occurring) - set(strongest)
        intervals = result.intervals_of(result.drawn)[result.drawn.atoms == atom].tolist()
        assert intervals == sorted(intervals, reverse=True)
        for interval in range(INTERVALS):
            left = [part for part in occurring if part not in strongest]
            in_interval = [part for part in left if part[0] / result.largest[atom] * INTERVALS // 1 == interval]
            assert intervals.count(interval) == min(DRAWN, len(in_interval))
        values = dense[:, atom][dense[:, atom] > 0]
        if len(values):
            counts = np.histogram(values, bins=BARS, range=(0, result.largest[atom]))[0]
            assert np.abs(np.cumsum(counts) - np.cumsum(result.bars[atom])).max() <= 1  # rounding at a border
    assert not result.bars[NEVER].any()


def test_the_result_does_not_depend_on_how_much_is_read_at_once(
    text: tuple[DenseStore, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, starts = text
    whole = found(store, starts)
    monkeypatch.setattr(atom_examples, "TOKENS_AT_ONCE", 90)
    in_blocks = found(store, starts)
    for name in ("strongest", "drawn"):
        for expected, values in zip(
            vars(getattr(whole, name)).values(), vars(getattr(in_blocks, name)).values(), strict=True
        ):
            np.testing.assert_array_equal(values, expected)


def test_no_more_than_a_block_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atom_examples, "TOKENS_AT_ONCE", 1000)
    rng = np.random.default_rng(5)
    store = DenseStore(random_codes(rng, 9_000))
    found(store, np.array([0, 10, 6_000, 9_000]))  # a sequence that is longer than a block, too
    assert 0 < store.longest_lookup <= 1000


def test_codes_that_are_all_empty_have_no_examples() -> None:
    result = found(DenseStore(np.zeros((50, NUM_ATOMS))), np.array([0, 20, 50]))
    assert len(result.strongest) == len(result.drawn) == 0
    assert not result.occurrences.any()


def test_examples_are_drawn_from_the_whole_text() -> None:
    dense = np.zeros((40_000, 1))
    dense[::10, 0] = 0.5
    dense[0, 0] = 1.0
    starts = np.arange(0, 40_001, 10)
    places = found(DenseStore(dense), starts).drawn.starts
    assert len(places) == DRAWN
    assert places.min() < 15_000 < 25_000 < places.max()


def test_a_store_on_disk(tmp_path: Path) -> None:
    store = CodeStore(write_store(tmp_path / "codes", random_store_codes(1, 10), BOUNDARIES))
    result = find_examples(store, np.array([0, 7, 10]))
    weights = store.rows(0, 10).toarray()
    np.testing.assert_array_equal(result.occurrences, (weights > 0).sum(axis=0))
    np.testing.assert_array_equal(result.largest, weights.max(axis=0))
