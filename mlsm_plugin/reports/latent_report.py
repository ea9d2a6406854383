"""What the latent properties mean: a summary of every dictionary atom, and one HTML page that shows them."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from mlsm_plugin.files.atomic_files import atomic_open
from mlsm_plugin.tokenization.word_boundaries import SENTENCEPIECE_BEGIN

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

TEMPLATE = "latent_report.html"
CHUNK_ENTRIES = 1 << 18  # entries of the codes that are processed at once: some tens of MB
NOTHING = -1  # fills a window beyond the first and the last token of a block
SENTENCE_END = "</s>"
UNSEEN_SYMBOLS = frozenset({"<s>", "<pad>"})


class Context(TypedDict):
    """An occurrence of an atom: ``left + token + right`` is the text around it."""

    left: str
    token: str
    right: str
    weight: float


@dataclass
class AtomSummary:
    """What one atom of the dictionary is used for."""

    atom: int
    frequency: float
    """Share of the coded tokens whose code has the atom."""
    mean_weight: float
    """Mean weight of the atom over the tokens whose code has it; 0 for a dead atom."""
    top_tokens: list[tuple[str, float]] = field(default_factory=list)
    """Pieces, each with its share of the atom's total weight; the largest share first."""
    contexts: list[Context] = field(default_factory=list)
    """Occurrences with the largest weights, preferably of distinct token types; the largest first."""


@dataclass
class _Occurrences:
    """Entries of the codes, one in each row: atom, weight and token, and the ids around the token."""

    atoms: np.ndarray  # (n,)
    types: np.ndarray  # (n,) the token's id
    weights: np.ndarray  # (n,) float64
    order: np.ndarray  # (n,) position in the stream: the earlier wins ties
    windows: np.ndarray  # (n, 2 * window + 1) ids, NOTHING beyond the block

    def __getitem__(self, rows: np.ndarray) -> _Occurrences:
        return _Occurrences(*(values[rows] for values in vars(self).values()))

    def joined(self, other: _Occurrences) -> _Occurrences:
        return _Occurrences(*map(np.concatenate, zip(vars(self).values(), vars(other).values(), strict=True)))

    @classmethod
    def none(cls, window: int) -> _Occurrences:
        empty = np.zeros(0, dtype=np.int64)
        windows = np.zeros((0, 2 * window + 1), dtype=np.int64)
        return cls(empty, empty, np.zeros(0), empty, windows)


def summarize_atoms(
    token_blocks: Iterable[tuple[np.ndarray, csr_matrix]],
    *,
    num_atoms: int,
    num_types: int,
    symbols: Sequence[str],
    top_tokens: int = 12,
    contexts: int = 6,
    window: int = 8,
) -> list[AtomSummary]:
    """Summarize every atom in one pass over coded text.

    The memory depends on the number of (atom, token type) pairs that occur and of contexts kept; it does not grow with
    the length of the text.

    The contexts of an atom are, for each token type, its occurrence with the largest weight; the largest weights come
    first. An atom with fewer than ``contexts`` types also gets its other occurrences, each text once.

    Args:
        token_blocks: pairs of the token ids ``(n,)`` of a block of text and its codes ``(n, num_atoms)``; rows sum
            to 1, rows of special tokens are empty.
        num_atoms: number of atoms of the dictionary.
        num_types: number of token types; every id is below it.
        symbols: the piece of every token type.
        top_tokens: number of token types to report per atom.
        contexts: number of occurrences to report per atom.
        window: number of tokens to show on each side of an occurrence.

    Returns:
        One summary per atom, in their order; dead atoms have frequency 0.

    Raises:
        ValueError: the codes do not match the ids, ``num_atoms`` or ``num_types``.
    """
    if len(symbols) < num_types:
        raise ValueError(f"{num_types} token types need as many symbols; there are {len(symbols)}")
    from scipy.sparse import csr_matrix

    coded_tokens = 0
    counts = np.zeros(num_atoms, dtype=np.int64)
    masses = csr_matrix((num_atoms, num_types), dtype=np.float64)
    best_of_types = _Occurrences.none(window)
    best_of_all = _Occurrences.none(window)
    for coded, entries in _chunks(token_blocks, num_atoms, num_types, window):
        coded_tokens += coded
        counts += np.bincount(entries.atoms, minlength=num_atoms)
        masses = masses + csr_matrix((entries.weights, (entries.atoms, entries.types)), shape=masses.shape)
        best_of_types = _keep_best(best_of_types, entries, num_atoms, contexts, distinct="types")
        best_of_all = _keep_best(best_of_all, entries, num_atoms, contexts, distinct="windows")
    totals = np.asarray(masses.sum(axis=1)).reshape(-1)
    summaries = [
        AtomSummary(atom, float(counts[atom] / max(coded_tokens, 1)), float(totals[atom] / max(counts[atom], 1)))
        for atom in range(num_atoms)
    ]
    _add_top_tokens(summaries, masses, totals, symbols, top_tokens)
    _add_contexts(summaries, best_of_types, best_of_all, symbols, contexts)
    return summaries


def _chunks(
    token_blocks: Iterable[tuple[np.ndarray, csr_matrix]], num_atoms: int, num_types: int, window: int
) -> Iterator[tuple[int, _Occurrences]]:
    """Number of coded tokens and the non-zero entries of the codes, several blocks at a time."""
    ids_parts: list[np.ndarray] = []
    rows_parts: list[np.ndarray] = []
    atoms_parts: list[np.ndarray] = []
    weights_parts: list[np.ndarray] = []
    margin = np.full(window, NOTHING, dtype=np.int64)
    done = filled = entries = 0  # tokens before this chunk; tokens and entries in it

    def chunk() -> tuple[int, _Occurrences]:
        ids = np.concatenate([margin, *ids_parts])
        rows = np.concatenate(rows_parts)
        windows = np.lib.stride_tricks.sliding_window_view(ids, 2 * window + 1)[rows - window]
        found = _Occurrences(
            np.concatenate(atoms_parts), ids[rows], np.concatenate(weights_parts), rows + done, windows
        )
        return len(np.unique(rows)), found

    for ids, codes in token_blocks:
        rows, atoms, weights = _entries_of(np.asarray(ids), codes, num_atoms, num_types)
        if not len(ids):
            continue
        rows_parts.append(rows + window + filled)
        atoms_parts.append(atoms)
        weights_parts.append(weights)
        ids_parts += [np.asarray(ids, dtype=np.int64), margin]
        filled += len(ids) + window
        entries += len(rows)
        if entries >= CHUNK_ENTRIES or filled >= CHUNK_ENTRIES:
            yield chunk()
            done += filled
            filled = entries = 0
            for parts in (ids_parts, rows_parts, atoms_parts, weights_parts):
                parts.clear()
    if ids_parts:
        yield chunk()


def _entries_of(
    ids: np.ndarray, codes: csr_matrix, num_atoms: int, num_types: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, atoms and weights of the non-zero entries of a block's codes, checked against the ids."""
    if codes.shape != (len(ids), num_atoms):
        raise ValueError(f"codes of shape {codes.shape} for {len(ids)} tokens and {num_atoms} atoms")
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_types:
        raise ValueError(f"token ids from {ids.min()} to {ids.max()}, but there are {num_types} token types")
    rows = np.repeat(np.arange(len(ids), dtype=np.int64), np.diff(codes.indptr))
    weights = codes.data.astype(np.float64)
    used = weights > 0
    return rows[used], codes.indices[used].astype(np.int64), weights[used]


def _keep_best(
    kept: _Occurrences, entries: _Occurrences, num_atoms: int, contexts: int, *, distinct: str
) -> _Occurrences:
    """The ``contexts`` largest weights of every atom, no two of them with the same type (or window).

    ``kept`` is what this function returned for the earlier entries.
    """
    if contexts < 1:
        return kept
    full = np.bincount(kept.atoms, minlength=num_atoms) == contexts
    smallest = np.full(num_atoms, np.inf)
    np.minimum.at(smallest, kept.atoms, kept.weights)
    bar = np.where(full, smallest, 0.0)  # a later entry must be above it
    found = kept.joined(entries[np.flatnonzero(entries.weights > bar[entries.atoms])])
    keys = found.types if distinct == "types" else _window_hashes(found.windows)
    # Sort equal (atom, key) together, the best of them first.
    by_key = np.lexsort((found.order, -found.weights, keys, found.atoms))
    atoms, keys = found.atoms[by_key], keys[by_key]
    first = np.ones(len(by_key), dtype=bool)
    first[1:] = (atoms[1:] != atoms[:-1]) | (keys[1:] != keys[:-1])
    unique = by_key[first]
    by_weight = unique[np.lexsort((found.order[unique], -found.weights[unique], found.atoms[unique]))]
    return found[by_weight[_rank_within_groups(found.atoms[by_weight]) < contexts]]


def _window_hashes(windows: np.ndarray) -> np.ndarray:
    """A 64-bit number per window: equal for equal windows, and in practice only for them."""
    rng = np.random.default_rng(0)
    hashes = np.zeros(len(windows), dtype=np.uint64)
    for column in windows.T:
        multiplier = np.uint64(int(rng.integers(1 << 62)) * 2 + 1)
        mixed = (column.astype(np.uint64) + np.uint64(1)) * multiplier
        hashes += mixed ^ (mixed >> np.uint64(29))
    return hashes


def _rank_within_groups(groups: np.ndarray) -> np.ndarray:
    """For sorted ``groups``, the position of every element in its group: [3, 3, 5, 5, 5] -> [0, 1, 0, 1, 2]."""
    positions = np.arange(len(groups))
    starts = np.r_[True, groups[1:] != groups[:-1]] if len(groups) else np.zeros(0, dtype=bool)
    return positions - np.maximum.accumulate(np.where(starts, positions, 0))


def _add_top_tokens(
    summaries: list[AtomSummary], masses: csr_matrix, totals: np.ndarray, symbols: Sequence[str], top_tokens: int
) -> None:
    pairs = masses.tocoo()
    order = np.lexsort((pairs.col, -pairs.data, pairs.row))
    order = order[_rank_within_groups(pairs.row[order]) < top_tokens]
    for atom, token_type, mass in zip(
        pairs.row[order].tolist(), pairs.col[order].tolist(), pairs.data[order].tolist(), strict=True
    ):
        summaries[atom].top_tokens.append((symbols[token_type], float(mass / totals[atom])))


def _add_contexts(
    summaries: list[AtomSummary],
    best_of_types: _Occurrences,
    best_of_all: _Occurrences,
    symbols: Sequence[str],
    contexts: int,
) -> None:
    # An atom with t < contexts types needs contexts - t other occurrences. They are among its `contexts` best of
    # all, of which at most t are shown already.
    both = best_of_types.joined(best_of_all)
    is_filler = np.arange(len(both.atoms)) >= len(best_of_types.atoms)
    hashes = _window_hashes(both.windows)
    order = np.lexsort((both.order, -both.weights, is_filler, both.atoms))
    shown: dict[int, list[tuple[float, int, int]]] = {}
    texts: dict[int, set[int]] = {}
    for row in order.tolist():
        atom, text = int(both.atoms[row]), int(hashes[row])
        rows = shown.setdefault(atom, [])
        if len(rows) < contexts and text not in texts.setdefault(atom, set()):
            texts[atom].add(text)
            rows.append((-float(both.weights[row]), int(both.order[row]), row))
    joined_by = "" if any(SENTENCEPIECE_BEGIN in symbol for symbol in symbols) else " "
    for atom, rows in shown.items():
        for _, _, row in sorted(rows):
            context = _read_window(both.windows[row].tolist(), symbols, joined_by)
            summaries[atom].contexts.append({**context, "weight": float(both.weights[row])})


def _read_window(window: Sequence[int], symbols: Sequence[str], joined_by: str) -> Context:
    """The text of a window of ids; the ends of sentences are shown as a pilcrow."""
    middle = len(window) // 2

    def read(ids: Sequence[int]) -> str:
        pieces = [symbols[index] for index in ids if index != NOTHING and symbols[index] not in UNSEEN_SYMBOLS]
        text = joined_by.join(" \u00b6 " if piece == SENTENCE_END else piece for piece in pieces)
        return re.sub(r"\s+", " ", text.replace(SENTENCEPIECE_BEGIN, " "))

    left, token, right = read(window[:middle]), read(window[middle : middle + 1]), read(window[middle + 1 :])
    if token.startswith(" ") or (joined_by and left):
        left += " "
    if token.endswith(" ") or (joined_by and right):
        right = " " + right
    left, right = re.sub(r"\s+", " ", left).lstrip(), re.sub(r"\s+", " ", right).rstrip()
    return {"left": left, "token": token.strip() or SENTENCEPIECE_BEGIN, "right": right, "weight": 0.0}


def render_report(
    summaries: Sequence[AtomSummary],
    *,
    title: str,
    facts: Mapping[str, str],
    output_path: str | os.PathLike[str],
) -> None:
    """Write the summaries as one HTML page that needs no other file and no network.

    Args:
        summaries: what :func:`summarize_atoms` returned.
        title: heading of the page.
        facts: names and values of other facts, such as the health of the dictionary and the model it came from.
        output_path: the page; written atomically.

    Raises:
        OSError: the page cannot be written.
    """
    template = resources.files("mlsm_plugin.reports").joinpath(TEMPLATE).read_text(encoding="utf-8")
    rows = "\n".join(
        f'<tr><th scope="row">{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    values = {
        "title": html.escape(title),
        "facts": rows,
        "data": _embedded_json(summaries),
        "script_hash": _script_hash(template),
    }
    page = re.sub(r"\{\{(" + "|".join(values) + r")\}\}", lambda match: values[match.group(1)], template)
    with atomic_open(output_path, "wb") as file:
        file.write(page.encode("utf-8", errors="replace"))


def _embedded_json(summaries: Sequence[AtomSummary]) -> str:
    """The data of the page as JSON, escaped so that no text in it can end the script early."""
    atoms = [
        {
            "atom": summary.atom,
            "frequency": _short(summary.frequency),
            "weight": _short(summary.mean_weight),
            "tokens": [[piece, _short(share)] for piece, share in summary.top_tokens],
            "contexts": [
                [context["left"], context["token"], context["right"], _short(context["weight"])]
                for context in summary.contexts
            ],
        }
        for summary in summaries
    ]
    text = json.dumps(atoms, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _script_hash(template: str) -> str:
    """How the page's policy names the only script that may run, so that no other can."""
    script = template.partition("<script>")[2].partition("</script>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _short(value: float) -> float:
    return float(f"{value:.4g}")
