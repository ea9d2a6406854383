"""Examples and figures of all atoms in coded text of any length, in two passes with flat memory.

The text is read in parts, which do not go beyond a sequence. An example is a part of the text in which an atom occurs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.grouped_ranks import ranks_in_groups, scattered

PART = 128  # tokens, at most
STRONGEST = 20  # examples of an atom
INTERVALS = 5  # of equal width, from 0 to the largest weight of an atom
DRAWN = 5  # examples of an atom and an interval, at most
BARS = 50  # of a histogram
TOKENS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Examples:
    """Parts of the text in which atoms occur; each array is ``(n,)``."""

    atoms: np.ndarray  # int64
    weights: np.ndarray  # float32, the largest of the atom in the part
    starts: np.ndarray  # int64, position of the first token
    stops: np.ndarray  # int64, position after the last token

    def __len__(self) -> int:
        return len(self.atoms)

    def __getitem__(self, rows: np.ndarray | slice) -> "Examples":
        return Examples(*(values[rows] for values in vars(self).values()))

    def joined(self, other: "Examples") -> "Examples":
        """These examples, then the others."""
        return Examples(*map(np.concatenate, zip(vars(self).values(), vars(other).values(), strict=True)))

    def keys(self, num_tokens: int) -> np.ndarray:
        """A number for each pair of an atom and a part, in a text of ``num_tokens``."""
        return self.atoms * num_tokens + self.starts


@dataclass(frozen=True)
class AtomExamples:
    """What :func:`find_examples` found, with n the number of atoms."""

    occurrences: np.ndarray  # (n,) int64, tokens that have the atom
    largest: np.ndarray  # (n,) float32, its largest weight; 0 if it does not occur
    bars: np.ndarray  # (n, BARS) int64, occurrences by weight, from 0 to the largest
    strongest: Examples  # at most STRONGEST for each atom, by atom, largest weight first
    drawn: Examples  # at random, at most DRAWN for each atom and interval, by atom, largest interval first
    parts: int  # of the text

    def intervals_of(self, examples: Examples) -> np.ndarray:
        """The interval of the weight of each example, from 0."""
        return _bins(examples.weights, self.largest[examples.atoms], INTERVALS)


@dataclass(frozen=True)
class _Block:
    """Some parts of the text, and each atom of each of their tokens: ``(n,)`` arrays."""

    starts: np.ndarray  # (parts,)
    stops: np.ndarray
    parts: np.ndarray  # (n,) of the token, from 0
    atoms: np.ndarray
    weights: np.ndarray

    def examples(self) -> Examples:
        """An example for each atom of each part."""
        order = np.lexsort((self.atoms, self.parts))
        parts = self.parts[order]
        atoms = self.atoms[order]
        begins = np.flatnonzero((np.diff(parts, prepend=-1) != 0) | (np.diff(atoms, prepend=-1) != 0))
        weights = np.maximum.reduceat(self.weights[order], begins) if len(begins) else self.weights
        return Examples(atoms[begins], weights, self.starts[parts[begins]], self.stops[parts[begins]])


def find_examples(store: CodeStore, starts: np.ndarray) -> AtomExamples:
    """The strongest examples of each atom, examples drawn from the range of its weights, and its figures.

    The memory depends on the numbers of atoms and sequences, not on the number of tokens or codes. The result does not
    depend on how the store is cut into shards.

    Args:
        store: codes of the text.
        starts: ``(sequences + 1,)``, the position of the first token of each sequence, then the number of tokens.

    Raises:
        ValueError: codes are damaged.
    """
    occurrences = np.zeros(store.num_atoms, dtype=np.int64)
    largest = np.zeros(store.num_atoms, dtype=np.float32)
    strongest = _no_examples()
    parts = 0
    for block in _blocks(store, starts, "finding the strongest examples"):
        parts += len(block.starts)
        occurrences += np.bincount(block.atoms, minlength=store.num_atoms)
        np.maximum.at(largest, block.atoms, block.weights)
        strongest = _keep_strongest(strongest, block.examples(), store.num_atoms)
    bars = np.zeros(store.num_atoms * BARS, dtype=np.int64)
    drawn = _no_examples()
    shown = np.sort(strongest.keys(store.num_tokens))
    for block in _blocks(store, starts, "drawing examples"):
        cells = block.atoms * BARS + _bins(block.weights, largest[block.atoms], BARS)
        bars += np.bincount(cells, minlength=len(bars))
        candidates = block.examples()
        drawn = _keep_drawn(drawn, candidates[~_is_in(candidates.keys(store.num_tokens), shown)], largest)
    return AtomExamples(occurrences, largest, bars.reshape(-1, BARS), strongest, drawn, parts)


def _no_examples() -> Examples:
    positions = np.zeros(0, dtype=np.int64)
    return Examples(positions, np.zeros(0, dtype=np.float32), positions, positions)


def _blocks(store: CodeStore, starts: np.ndarray, what: str) -> Iterator[_Block]:
    """The codes of about ``TOKENS_AT_ONCE`` tokens in whole parts at a time."""
    with Progress(total=int(starts[-1]), desc=what, unit="token", unit_scale=True) as progress:
        first = 0
        while first < len(starts) - 1:
            last = int(np.searchsorted(starts, starts[first] + TOKENS_AT_ONCE, side="right")) - 1
            last = max(last, first + 1)
            part_starts, part_stops = _cut(starts[first : last + 1])
            for begin in _groups(part_starts, part_stops):
                yield _block(store, part_starts[begin], part_stops[begin])
            progress.update(int(starts[last] - starts[first]))
            first = last


def _cut(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and last positions of parts of about equal length, at most ``PART`` tokens, of some sequences."""
    lengths = np.diff(starts)
    counts = -(-lengths // PART)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(starts[:-1], counts)
    spans = np.repeat(lengths, counts)
    divisors = np.repeat(counts, counts)
    return begins + numbers * spans // divisors, begins + (numbers + 1) * spans // divisors


def _groups(starts: np.ndarray, stops: np.ndarray) -> Iterator[slice]:
    """Slices of consecutive parts with at most about ``TOKENS_AT_ONCE`` tokens, for a sequence of any length."""
    first = 0
    while first < len(starts):
        last = int(np.searchsorted(stops, starts[first] + TOKENS_AT_ONCE, side="right"))
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def _block(store: CodeStore, starts: np.ndarray, stops: np.ndarray) -> _Block:
    atoms, weights = store.lookup(np.arange(starts[0], stops[-1]))
    used = weights > 0
    positions = starts[0] + np.nonzero(used)[0]
    parts = np.searchsorted(starts, positions, side="right") - 1
    return _Block(starts, stops, parts, atoms[used].astype(np.int64), weights[used].astype(np.float32))


def _bins(weights: np.ndarray, largest: np.ndarray, number: int) -> np.ndarray:
    """The bin of each weight, one of ``number`` equal bins from 0 to the largest weight."""
    return np.minimum((weights / largest * number).astype(np.int64), number - 1)


def _is_in(keys: np.ndarray, sorted_keys: np.ndarray) -> np.ndarray:
    places = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return sorted_keys[places] == keys


def _keep_strongest(kept: Examples, examples: Examples, num_atoms: int) -> Examples:
    """The ``STRONGEST`` examples of each atom, by atom, strongest first; of equal ones the earlier."""
    smallest = np.full(num_atoms, np.inf, dtype=np.float32)
    np.minimum.at(smallest, kept.atoms, kept.weights)
    smallest[np.bincount(kept.atoms, minlength=num_atoms) < STRONGEST] = 0.0
    candidates = kept.joined(examples[examples.weights > smallest[examples.atoms]])
    ranks = ranks_in_groups((candidates.atoms,), (-candidates.weights, candidates.starts))
    candidates = candidates[ranks < STRONGEST]
    return candidates[np.lexsort((candidates.starts, -candidates.weights, candidates.atoms))]


def _keep_drawn(kept: Examples, examples: Examples, largest: np.ndarray) -> Examples:
    """``DRAWN`` examples for each atom and interval, by atom, largest interval first; all with the same chance."""
    number_of_cells = len(largest) * INTERVALS
    cells = _cells(kept, largest)
    last = np.zeros(number_of_cells, dtype=np.uint64)
    np.maximum.at(last, cells, scattered(kept.starts))
    last[np.bincount(cells, minlength=number_of_cells) < DRAWN] = np.iinfo(np.uint64).max
    candidates = kept.joined(examples[scattered(examples.starts) < last[_cells(examples, largest)]])
    cells = _cells(candidates, largest)
    chosen = ranks_in_groups((cells,), (scattered(candidates.starts), candidates.starts)) < DRAWN
    candidates = candidates[chosen]
    intervals = cells[chosen] % INTERVALS
    return candidates[np.lexsort((candidates.starts, -intervals, candidates.atoms))]


def _cells(examples: Examples, largest: np.ndarray) -> np.ndarray:
    """A number for the atom and interval of each example."""
    return examples.atoms * INTERVALS + _bins(examples.weights, largest[examples.atoms], INTERVALS)
