"""What the latent properties mean: a summary of every dictionary atom, and one HTML page that shows them."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TypedDict

import numpy as np
from scipy.sparse import csr_matrix, vstack

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_open
from mlsm_plugin.core.masking.word_boundaries import SENTENCEPIECE_BEGIN

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
    """What one atom of the dictionary is used for; the tokens and contexts with the largest weights come first."""

    atom: int
    frequency: float  # share of the coded tokens whose code has the atom; 0 for a dead atom
    mean_weight: float  # over these tokens; 0 for a dead atom
    top_tokens: list[tuple[str, float]] = field(default_factory=list)  # pieces, with their shares of the total weight
    contexts: list[Context] = field(default_factory=list)  # preferably of distinct token types


@dataclass
class _Occurrences:
    """Entries of the codes, one in each row: atom, weight and token, and the ids around the token."""

    atoms: np.ndarray  # (n,)
    types: np.ndarray  # (n,) the token's id
    weights: np.ndarray  # (n,) float64
    order: np.ndarray  # (n,) position in the stream: the earlier wins ties
    windows: np.ndarray  # (n, 2 * window + 1) ids, NOTHING beyond the block

    def __getitem__(self, rows: np.ndarray) -> "_Occurrences":
        return _Occurrences(*(values[rows] for values in vars(self).values()))

    def joined(self, other: "_Occurrences") -> "_Occurrences":
        return _Occurrences(*map(np.concatenate, zip(vars(self).values(), vars(other).values(), strict=True)))


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
    """Summarize every atom, also the dead ones, in their order, in one pass over coded text.

    The memory depends on the number of (atom, token type) pairs that occur and of contexts kept; it does not grow with
    the length of the text. The contexts of an atom are, for each token type, its occurrence with the largest weight;
    the largest weights come first. An atom with fewer than ``contexts`` types also gets its other occurrences, each
    text once. ValueError if the codes do not match the ids, ``num_atoms`` or ``num_types``.

    Args:
        token_blocks: pairs of the token ids ``(n,)`` of a block of text and its codes ``(n, num_atoms)``; rows sum
            to 1, rows of special tokens are empty.
        num_types: number of token types; every id is below it.
        symbols: the piece of every token type.
        top_tokens, contexts: number of token types and of occurrences to report per atom.
        window: number of tokens to show on each side of an occurrence.
    """
    if len(symbols) < num_types:
        raise ValueError(f"{num_types} token types need as many symbols; there are {len(symbols)}")
    coded_tokens = 0
    counts = np.zeros(num_atoms, dtype=np.int64)
    masses = csr_matrix((num_atoms, num_types), dtype=np.float64)
    best = _occurrences([], 0, num_atoms, window)
    for entries in _chunks(token_blocks, num_atoms, num_types, window):
        coded_tokens += len(np.unique(entries.order))
        counts += np.bincount(entries.atoms, minlength=num_atoms)
        masses = masses + csr_matrix((entries.weights, (entries.atoms, entries.types)), shape=masses.shape)
        best = _keep_best(best, entries, num_atoms, contexts)
    totals = np.asarray(masses.sum(axis=1)).reshape(-1)
    summaries = [
        AtomSummary(atom, float(counts[atom] / max(coded_tokens, 1)), float(totals[atom] / max(counts[atom], 1)))
        for atom in range(num_atoms)
    ]
    pairs = masses.tocoo()
    shown = np.flatnonzero(_places((pairs.row,), (-pairs.data, pairs.col)) < top_tokens)
    for pair in shown[np.lexsort((pairs.col[shown], -pairs.data[shown]))].tolist():
        atom = pairs.row[pair]
        summaries[atom].top_tokens.append((symbols[pairs.col[pair]], float(pairs.data[pair] / totals[atom])))
    joined_by = "" if any(SENTENCEPIECE_BEGIN in symbol for symbol in symbols) else " "
    for row in np.lexsort((best.order, -best.weights)).tolist():
        context = _read_window(best.windows[row].tolist(), symbols, joined_by, float(best.weights[row]))
        summaries[best.atoms[row]].contexts.append(context)
    return summaries


def _chunks(
    token_blocks: Iterable[tuple[np.ndarray, csr_matrix]], num_atoms: int, num_types: int, window: int
) -> Iterator[_Occurrences]:
    """The non-zero entries of the codes, several blocks at a time."""
    blocks: list[tuple[np.ndarray, csr_matrix]] = []
    done = tokens = entries = 0  # tokens before this chunk; tokens and entries in it
    for ids, codes in token_blocks:
        if codes.shape != (len(ids), num_atoms):
            raise ValueError(f"codes of shape {codes.shape} for {len(ids)} tokens and {num_atoms} atoms")
        if len(ids) and not 0 <= ids.min() <= ids.max() < num_types:
            raise ValueError(f"token ids from {ids.min()} to {ids.max()}, but there are {num_types} token types")
        blocks.append((ids, codes))
        tokens += len(ids)
        entries += codes.nnz
        if max(tokens, entries) >= CHUNK_ENTRIES:
            yield _occurrences(blocks, done, num_atoms, window)
            done += tokens
            tokens = entries = 0
            blocks = []
    yield _occurrences(blocks, done, num_atoms, window)


def _occurrences(
    blocks: Sequence[tuple[np.ndarray, csr_matrix]], done: int, num_atoms: int, window: int
) -> _Occurrences:
    """The non-zero entries of the codes of blocks, before which there are ``done`` tokens."""
    codes = vstack([csr_matrix((0, num_atoms)), *(codes for _, codes in blocks)], format="csr", dtype=np.float64)
    margin = np.full(max(window, 1), NOTHING, dtype=np.int64)
    ids = np.concatenate([margin, *(part for ids, _ in blocks for part in (ids, margin))])
    used = codes.data > 0
    rows = np.repeat(np.arange(codes.shape[0]), np.diff(codes.indptr))[used]
    places = np.flatnonzero(ids != NOTHING)[rows]
    around = places[:, None] + np.arange(-window, window + 1)
    return _Occurrences(codes.indices[used].astype(np.int64), ids[places], codes.data[used], rows + done, ids[around])


def _keep_best(kept: _Occurrences, entries: _Occurrences, num_atoms: int, contexts: int) -> _Occurrences:
    """The ``contexts`` occurrences of every atom to show; ``kept`` is what this returned for the earlier entries."""
    types_kept = np.bincount(np.unique(np.stack([kept.atoms, kept.types]), axis=1)[0], minlength=num_atoms)
    bar = np.full(num_atoms, np.inf)
    np.minimum.at(bar, kept.atoms, kept.weights)
    bar[types_kept < contexts] = 0.0
    candidates = kept.joined(entries[np.flatnonzero(entries.weights > bar[entries.atoms])])
    # each text once, and first the best of each type
    candidates = candidates[
        _places((candidates.atoms, _window_hashes(candidates.windows)), (-candidates.weights, candidates.order)) == 0
    ]
    of_known_type = _places((candidates.atoms, candidates.types), (-candidates.weights, candidates.order)) > 0
    return candidates[_places((candidates.atoms,), (of_known_type, -candidates.weights, candidates.order)) < contexts]


def _window_hashes(windows: np.ndarray) -> np.ndarray:
    """A 64-bit number per window: equal for equal windows, and in practice only for them."""
    rng = np.random.default_rng(0)
    hashes = np.zeros(len(windows), dtype=np.uint64)
    for column in windows.T:
        multiplier = np.uint64(int(rng.integers(1 << 62)) * 2 + 1)
        mixed = (column.astype(np.uint64) + np.uint64(1)) * multiplier
        hashes += mixed ^ (mixed >> np.uint64(29))
    return hashes


def _places(groups: tuple[np.ndarray, ...], by: tuple[np.ndarray, ...]) -> np.ndarray:
    """The place of each element among those that are equal in all ``groups``, sorted by the first of ``by``, ..."""
    order = np.lexsort((*reversed(by), *groups))
    positions = np.arange(len(order))
    begins = np.zeros(len(order), dtype=bool)
    for group in groups:
        begins[1:] |= group[order][1:] != group[order][:-1]
    places = np.empty_like(positions)
    places[order] = positions - np.maximum.accumulate(np.where(begins, positions, 0))
    return places


def _read_window(window: Sequence[int], symbols: Sequence[str], joined_by: str, weight: float) -> Context:
    """The text of a window of ids; the ends of sentences are shown as a pilcrow."""
    middle = len(window) // 2

    def read(ids: Sequence[int]) -> str:
        pieces = [symbols[index] for index in ids if index != NOTHING and symbols[index] not in UNSEEN_SYMBOLS]
        text = joined_by.join(" \u00b6 " if piece == SENTENCE_END else piece for piece in pieces)
        return re.sub(r"\s+", " ", text.replace(SENTENCEPIECE_BEGIN, " "))

    left = read(window[:middle])
    token = read(window[middle : middle + 1])
    right = read(window[middle + 1 :])
    if token.startswith(" ") or (joined_by and left):
        left += " "
    if token.endswith(" ") or (joined_by and right):
        right = " " + right
    left = re.sub(r"\s+", " ", left).lstrip()
    right = re.sub(r"\s+", " ", right).rstrip()
    return {"left": left, "token": token.strip() or SENTENCEPIECE_BEGIN, "right": right, "weight": weight}


def render_report(
    summaries: Sequence[AtomSummary], *, title: str, facts: Mapping[str, str], output_path: PathLike
) -> None:
    """Write summaries, and names and values of other facts, as one HTML page that needs no other file or network."""
    template = resources.files("mlsm_plugin.reports").joinpath(TEMPLATE).read_text(encoding="utf-8")
    rows = (
        f'<tr><th scope="row">{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    values = {"title": html.escape(title), "facts": "\n".join(rows)}
    values |= {"data": _embedded_json(summaries), "script_hash": _script_hash(template)}
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
