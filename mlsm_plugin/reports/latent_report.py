"""What the latent properties mean: a summary of each dictionary atom, and an HTML page that shows them all."""

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
from mlsm_plugin.core.masking.word_boundaries import BYTE_LEVEL_BEGIN, SENTENCEPIECE_BEGIN, WORDPIECE_GOES_ON
from mlsm_plugin.core.sparse_coding.grouped_ranks import ranks_in_groups, scattered
from mlsm_plugin.core.sparse_coding.telling_tokens import telling_tokens
from mlsm_plugin.core.text.text_files import LONE_SURROGATE

TEMPLATE = "latent_report.html"
CHUNK_ENTRIES = 1 << 18  # entries of the codes to process at a time: some tens of MB
NOTHING = -1  # fills a window before the first and after the last token of a block
NEIGHBOUR_ROWS = 1024
BINS = 20  # bins of weights, each half an octave: from 1/1024 to 1
QUANTILES = (0.75, 0.5, 0.1)  # of an atom's weights; examples are drawn around them
LABEL_TOKENS = 3
TOLD = 0.1  # the other tokens of a label tell at least this share of what the first tells
FEW_OCCURRENCES = 100  # with this many, an atom tells half as much as with very many
SENTENCE_ENDS = frozenset({"</s>", "[SEP]"})
# fields of an atom on the page, in the order of its row
KEYS = (
    "atom",
    "frequency",
    "weight",
    "label",
    "called",
    "telling",
    "bars",
    "near",
    "tokens",
    "raised",
    "lowered",
    "contexts",
    "examples",
)
LEVELS = 9  # of colour; the largest weight of an atom has the highest level
UNSEEN_SYMBOLS = frozenset({"<s>", "<pad>", "[CLS]", "[PAD]"})


class Context(TypedDict):
    """An occurrence of an atom: ``left + token + right`` is the text around it."""

    left: str
    token: str
    right: str
    weight: float
    marks: list[tuple[int, int, float]]  # other tokens with the atom: their first character, length and weight


@dataclass
class AtomSummary:
    """What one atom of the dictionary is used for; the tokens and contexts with the largest weights come first."""

    atom: int
    frequency: float  # share of the coded tokens that have the atom; 0 for a dead atom
    mean_weight: float  # over these tokens; 0 for a dead atom
    top_tokens: list[tuple[str, float]] = field(default_factory=list)  # pieces, with their shares of the total weight
    contexts: list[Context] = field(default_factory=list)  # preferably of distinct token types
    examples: list[Context] = field(default_factory=list)  # drawn at random around QUANTILES of its weights
    label: list[str] = field(default_factory=list)  # the most telling pieces: by weight relative to frequency
    telling: float = 0.0  # how much the label tells; 0 for a dead atom
    histogram: list[int] = field(default_factory=list)  # (BINS,) occurrences by weight
    neighbours: list[tuple[int, float]] = field(default_factory=list)  # the nearest atoms, with their cosines
    name: str = ""  # from a person or another program
    raised: list[str] = field(default_factory=list)  # pieces whose logits rise most with the atom, most first
    lowered: list[str] = field(default_factory=list)  # pieces whose logits fall most, most first


@dataclass
class _Occurrences:
    """Entries of the codes, one per row: atom, weight, token, and the ids around the token."""

    atoms: np.ndarray  # (n,)
    types: np.ndarray  # (n,) the token's id
    weights: np.ndarray  # (n,) float64
    order: np.ndarray  # (n,) position in the stream; ties go to the earlier
    windows: np.ndarray  # (n, 2 * window + 3) ids, NOTHING beyond the block; the first and last are not shown
    weights_around: np.ndarray  # (n, 2 * window + 3) float32, of the atom; NaN until looked up

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
    top_tokens: int = 8,
    contexts: int = 4,
    window: int = 7,
) -> list[AtomSummary]:
    """Summarize every atom, including dead atoms, in order, in one pass over coded text.

    The memory depends on the number of (atom, token type) pairs that occur and the number of contexts kept; it does not
    grow with the length of the text. The contexts of an atom are its occurrences with the largest weights, one for each
    token type, largest first. If it has fewer than ``contexts`` types, its other occurrences follow, each text once.
    Each summary also has a histogram of the atom's weights, its most telling tokens, and up to three examples drawn at
    random from the middle and the bottom of its weights. ValueError if the codes do not match the ids, ``num_atoms`` or
    ``num_types``.

    Args:
        token_blocks: for each block of text, its token ids ``(n,)`` and codes ``(n, num_atoms)``; the codes of a token
            sum to 1, and special tokens have none.
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
    histograms = np.zeros((num_atoms, BINS), dtype=np.int64)
    best = _occurrences([], csr_matrix((0, num_atoms)), 0, window)
    drawn = best
    done = 0
    for codes, entries in _chunks(token_blocks, num_atoms, num_types, window):
        coded_tokens += len(np.unique(entries.order))
        counts += np.bincount(entries.atoms, minlength=num_atoms)
        masses = masses + csr_matrix((entries.weights, (entries.atoms, entries.types)), shape=masses.shape)
        best = _keep_best(best, entries, num_atoms, contexts)
        np.add.at(histograms, (entries.atoms, _bins(entries.weights)), 1)
        drawn = _keep_drawn(drawn, entries)
        _look_up_weights(best, codes, done)
        _look_up_weights(drawn, codes, done)
        done += codes.shape[0]
    totals = np.asarray(masses.sum(axis=1)).reshape(-1)
    summaries = [
        AtomSummary(atom, float(counts[atom] / max(coded_tokens, 1)), float(totals[atom] / max(counts[atom], 1)))
        for atom in range(num_atoms)
    ]
    pairs = masses.tocoo()
    shown = np.flatnonzero(ranks_in_groups((pairs.row,), (-pairs.data, pairs.col)) < top_tokens)
    for pair in shown[np.lexsort((pairs.col[shown], -pairs.data[shown]))].tolist():
        atom = pairs.row[pair]
        summaries[atom].top_tokens.append((symbols[pairs.col[pair]], float(pairs.data[pair] / totals[atom])))
    for summary, (tokens, parts) in zip(summaries, telling_tokens(masses, LABEL_TOKENS), strict=True):
        _set_label(summary, tokens, parts, masses, int(counts[summary.atom]), symbols)
        summary.histogram = histograms[summary.atom].tolist()
    reader = _WindowReader(symbols)
    for row in np.lexsort((best.order, -best.weights)).tolist():
        summaries[best.atoms[row]].contexts.append(reader.context(best, row))
    for row in _rows_at_quantiles(drawn, histograms).tolist():
        context = reader.context(drawn, row)
        summary = summaries[drawn.atoms[row]]
        if context not in summary.contexts:
            summary.examples.append(context)
    return summaries


def _set_label(
    summary: AtomSummary,
    tokens: np.ndarray,
    parts: np.ndarray,
    masses: csr_matrix,
    occurrences: int,
    symbols: Sequence[str],
) -> None:
    """Set the label to the most telling tokens, and set how much it tells.

    A label tells the geometric mean, over its tokens, of their rarity elsewhere times the root of their share. Atoms of
    several related words therefore come before atoms of a single word, and before atoms of words that are everywhere.
    """
    if not len(tokens):
        return
    is_telling = parts >= max(TOLD * parts[0], 1e-12)
    is_telling[0] = True
    summary.label = [symbols[token] for token in tokens[is_telling].tolist()]
    shares = masses[summary.atom, tokens].toarray().ravel() / masses[summary.atom].sum()
    values = np.full(LABEL_TOKENS, TOLD)
    values[: len(tokens)] = np.where(is_telling, np.maximum(parts / np.sqrt(shares), TOLD), TOLD)
    summary.telling = float(np.exp(np.log(values).mean())) * occurrences / (occurrences + FEW_OCCURRENCES)


def set_neighbours(summaries: Sequence[AtomSummary], atoms: np.ndarray, count: int = 4) -> None:
    """Set the nearest atoms of each summary by the cosine of their directions, ``(n_atoms, dim)``; only cosines > 0."""
    unit = np.asarray(atoms, dtype=np.float32)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    for first in range(0, len(unit), NEIGHBOUR_ROWS):
        cosines = unit[first : first + NEIGHBOUR_ROWS] @ unit.T
        rows = np.arange(len(cosines))
        cosines[rows, rows + first] = -1.0  # the atom itself
        nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
        for row, numbers in enumerate(nearest.tolist()):
            pairs = [(number, float(cosines[row, number])) for number in numbers]
            summaries[first + row].neighbours = [pair for pair in pairs if pair[1] > 0]


def word_mark(symbols: Sequence[str]) -> str:
    """The mark that begins a word in a vocabulary: SentencePiece's, byte-level BPE's, or an empty string."""
    if any(SENTENCEPIECE_BEGIN in symbol for symbol in symbols):
        return SENTENCEPIECE_BEGIN
    num_marked = sum(symbol.startswith(BYTE_LEVEL_BEGIN) for symbol in symbols)
    return BYTE_LEVEL_BEGIN if num_marked > len(symbols) / 10 else ""  # the mark is also a letter of Maltese


def _bins(weights: np.ndarray) -> np.ndarray:
    """The bin of each weight; a bin spans half an octave, and the last bin ends at 1."""
    return np.clip(np.floor(2 * np.log2(weights)).astype(np.int64) + BINS, 0, BINS - 1)


def _keep_drawn(kept: _Occurrences, entries: _Occurrences) -> _Occurrences:
    """Draw an occurrence for each atom and bin of weights, all with the same chance."""
    candidates = kept.joined(entries)
    hashes = scattered(candidates.order)
    return candidates[ranks_in_groups((candidates.atoms, _bins(candidates.weights)), (hashes, candidates.order)) == 0]


def _rows_at_quantiles(drawn: _Occurrences, histograms: np.ndarray) -> np.ndarray:
    """The rows of ``drawn`` in the bins that hold the :data:`QUANTILES` of their atoms, largest weights first."""
    cumulative = np.cumsum(histograms, axis=1)
    chosen = np.zeros(histograms.shape, dtype=bool)
    for quantile in QUANTILES:
        reached = cumulative >= quantile * cumulative[:, -1:]
        chosen[np.arange(len(histograms)), reached.argmax(axis=1)] = True
    rows = np.flatnonzero(chosen[drawn.atoms, _bins(drawn.weights)])
    return rows[np.argsort(-drawn.weights[rows], kind="stable")]


def _chunks(
    token_blocks: Iterable[tuple[np.ndarray, csr_matrix]], num_atoms: int, num_types: int, window: int
) -> Iterator[tuple[csr_matrix, _Occurrences]]:
    """Yield the codes of several blocks at a time, with their non-zero entries."""
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
            yield _chunk(blocks, done, num_atoms, window)
            done += tokens
            tokens = entries = 0
            blocks = []
    yield _chunk(blocks, done, num_atoms, window)


def _chunk(
    blocks: Sequence[tuple[np.ndarray, csr_matrix]], done: int, num_atoms: int, window: int
) -> tuple[csr_matrix, _Occurrences]:
    codes = _stacked(blocks, num_atoms)
    return codes, _occurrences([ids for ids, _ in blocks], codes, done, window)


def _stacked(blocks: Sequence[tuple[np.ndarray, csr_matrix]], num_atoms: int) -> csr_matrix:
    """The codes of blocks, one below the other, with sorted indices."""
    codes = vstack([csr_matrix((0, num_atoms)), *(codes for _, codes in blocks)], format="csr", dtype=np.float64)
    codes.sort_indices()
    return csr_matrix(codes)


def _occurrences(blocks: Sequence[np.ndarray], codes: csr_matrix, done: int, window: int) -> _Occurrences:
    """The non-zero entries of the ``codes`` of some blocks of ids; ``done`` tokens precede the blocks."""
    margin = np.full(window + 1, NOTHING, dtype=np.int64)
    ids = np.concatenate([margin, *(part for ids in blocks for part in (ids, margin))])
    used = codes.data > 0
    rows = np.repeat(np.arange(codes.shape[0]), np.diff(codes.indptr))[used]
    places = np.flatnonzero(ids != NOTHING)[rows]
    around = places[:, None] + np.arange(-window - 1, window + 2)
    return _Occurrences(
        atoms=codes.indices[used].astype(np.int64),
        types=ids[places],
        weights=codes.data[used],
        order=rows + done,
        windows=ids[around],
        weights_around=np.full(around.shape, np.nan, dtype=np.float32),
    )


def _look_up_weights(kept: _Occurrences, codes: csr_matrix, done: int) -> None:
    """Set the weights around the occurrences in ``codes``; ``done`` tokens precede the codes."""
    new = np.flatnonzero((kept.order >= done) & np.isnan(kept.weights_around[:, 0]))
    if not len(new):
        return
    reach = kept.windows.shape[1] // 2
    rows = kept.order[new, None] - done + np.arange(-reach, reach + 1)
    keys = rows * codes.shape[1] + kept.atoms[new, None]
    stored = np.repeat(np.arange(codes.shape[0]), np.diff(codes.indptr)) * codes.shape[1] + codes.indices
    places = np.minimum(np.searchsorted(stored, keys), len(stored) - 1)
    is_stored = (stored[places] == keys) & (kept.windows[new] != NOTHING)
    kept.weights_around[new] = np.where(is_stored, codes.data[places], 0.0)


def _keep_best(kept: _Occurrences, entries: _Occurrences, num_atoms: int, contexts: int) -> _Occurrences:
    """The ``contexts`` occurrences to show of each atom; ``kept`` is the result for the earlier entries."""
    types_kept = np.bincount(np.unique(np.stack([kept.atoms, kept.types]), axis=1)[0], minlength=num_atoms)
    bar = np.full(num_atoms, np.inf)
    np.minimum.at(bar, kept.atoms, kept.weights)
    bar[types_kept < contexts] = 0.0
    candidates = kept.joined(entries[np.flatnonzero(entries.weights > bar[entries.atoms])])
    # keep each text once; the best occurrence of each type comes first
    candidates = candidates[
        ranks_in_groups(
            (candidates.atoms, _window_hashes(candidates.windows[:, 1:-1])), (-candidates.weights, candidates.order)
        )
        == 0
    ]
    repeats_type = ranks_in_groups((candidates.atoms, candidates.types), (-candidates.weights, candidates.order)) > 0
    return candidates[
        ranks_in_groups((candidates.atoms,), (repeats_type, -candidates.weights, candidates.order)) < contexts
    ]


def _window_hashes(windows: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each window; in practice, different windows have different hashes."""
    rng = np.random.default_rng(0)
    hashes = np.zeros(len(windows), dtype=np.uint64)
    for column in windows.T:
        multiplier = np.uint64(int(rng.integers(1 << 62)) * 2 + 1)
        mixed = (column.astype(np.uint64) + np.uint64(1)) * multiplier
        hashes += mixed ^ (mixed >> np.uint64(29))
    return hashes


class _WindowReader:
    """Turns windows of ids into text in whole words; a pilcrow shows the end of a sentence."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self._symbols = symbols
        self._mark = word_mark(symbols)

    def context(self, occurrences: _Occurrences, row: int) -> Context:
        """The text around an occurrence, without words that the window cuts, except the word of the token."""
        window: list[int] = occurrences.windows[row].tolist()
        weights = occurrences.weights_around[row].tolist()
        middle = len(window) // 2
        text = ""
        marks: list[tuple[int, int, float]] = []
        start = stop = 0
        for place in range(self._first(window), self._last(window) + 1):
            piece = self._text(window[place])
            if place == middle and not piece.strip():
                piece = self._mark or "\u2581"
            text += piece.lstrip() if not text or text.endswith(" ") else piece
            length = len(piece.strip())
            end = len(text.rstrip())
            if place == middle:
                start = end - length
                stop = end
            elif weights[place] > 0 and length:
                marks.append((end - length, length, float(weights[place])))
        weight = float(occurrences.weights[row])
        right = text[stop:].rstrip()
        return {"left": text[:start], "token": text[start:stop], "right": right, "weight": weight, "marks": marks}

    def _text(self, number: int) -> str:
        if number == NOTHING or self._symbols[number] in UNSEEN_SYMBOLS:
            return ""
        symbol = self._symbols[number]
        text = " \u00b6 " if symbol in SENTENCE_ENDS else _spaced(symbol, self._mark)
        return re.sub(r"\s+", " ", text)

    def _begins_word(self, number: int) -> bool:
        """Whether a token begins a word; True where the block has no token."""
        if number == NOTHING:
            return True
        symbol = self._symbols[number]
        return symbol in SENTENCE_ENDS or symbol in UNSEEN_SYMBOLS or _spaced(symbol, self._mark).startswith(" ")

    def _first(self, window: list[int]) -> int:
        """The place of the first token to show."""
        if window[0] == NOTHING:
            return 1
        return next((place for place in range(1, len(window) // 2 + 1) if self._begins_word(window[place])), 1)

    def _last(self, window: list[int]) -> int:
        """The place of the last token to show."""
        middle = len(window) // 2
        for place in range(len(window) - 1, middle, -1):
            if self._begins_word(window[place]):
                return place - 1
        return len(window) - 2


def _spaced(piece: str, mark: str) -> str:
    """A piece as it appears in text, with a space before it if it begins a word."""
    if mark:
        return piece.replace(mark, " ")
    return piece[2:] if piece.startswith(WORDPIECE_GOES_ON) and len(piece) > 2 else " " + piece


def render_report(
    summaries: Sequence[AtomSummary], *, title: str, facts: Mapping[str, str], output_path: PathLike
) -> None:
    """Write summaries and other facts (values by name) as a self-contained HTML page."""
    template = resources.files("mlsm_plugin.reports").joinpath(TEMPLATE).read_text(encoding="utf-8")
    rows = (
        f'<tr><th scope="row">{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    marks = marks_legend([piece for summary in summaries for piece, _ in summary.top_tokens])
    values = {"title": html.escape(title), "facts": "\n".join(rows), "marks": html.escape(marks)}
    values |= {"data": _embedded_json(summaries), "script_hash": _script_hash(template)}
    page = re.sub(r"\{\{(" + "|".join(values) + r")\}\}", lambda match: values[match.group(1)], template)
    with atomic_open(output_path, "wb") as file:
        file.write(page.encode("utf-8", errors="replace"))


def marks_legend(pieces: Sequence[str]) -> str:
    """What the marks in some pieces mean: a sentence and a space for each mark that occurs."""
    meanings = {
        SENTENCEPIECE_BEGIN: "begins a word",
        BYTE_LEVEL_BEGIN: "begins a word",
        WORDPIECE_GOES_ON: "continues a word",
    }
    used = [mark for mark in meanings if any(piece.startswith(mark) and len(piece) > len(mark) for piece in pieces)]
    return "".join(f"{mark} {meanings[mark]}. " for mark in used)


def _embedded_json(summaries: Sequence[AtomSummary]) -> str:
    """The data of the page as JSON, escaped so that no text ends the script early; rows refer to a table of pieces."""
    pieces: dict[str, int] = {}

    def numbers(texts: Iterable[str]) -> list[int]:
        return [pieces.setdefault(piece, len(pieces)) for piece in texts]

    rows = []
    for summary in summaries:
        highest = max((context["weight"] for context in summary.contexts), default=1.0)
        shares = [_short(share) for _, share in summary.top_tokens]
        rows.append(
            [
                summary.atom,
                _short(summary.frequency),
                _short(summary.mean_weight),
                numbers(summary.label),
                summary.name,
                _short(summary.telling),
                _bars(summary.histogram),
                [[number, round(cosine, 2)] for number, cosine in summary.neighbours],
                list(zip(numbers(piece for piece, _ in summary.top_tokens), shares, strict=True)),
                numbers(summary.raised),
                numbers(summary.lowered),
                [_cells(context, highest) for context in summary.contexts],
                [_cells(context, highest) for context in summary.examples],
            ]
        )
    data = {"keys": KEYS, "pieces": list(pieces), "rows": rows}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = LONE_SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)  # UTF-8 cannot encode it
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _cells(context: Context, highest: float) -> list[str | float | list[int]]:
    """The texts, weight and level of a context, then the start, length and level of each mark.

    Starts and lengths are in units of UTF-16, which JavaScript counts.
    """
    weight = context["weight"]
    cells: list[str | float | list[int]] = [context["left"], context["token"], context["right"], round(weight, 3)]
    cells.append(_level(weight, highest))
    text = context["left"] + context["token"] + context["right"]
    marks = [
        (_utf16_length(text[:start]), _utf16_length(text[start : start + length]), _level(strength, highest))
        for start, length, strength in context["marks"]
    ]
    if marks:
        cells.append([number for mark in marks for number in mark])
    return cells


def _utf16_length(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _level(weight: float, highest: float) -> int:
    """The level of colour of a weight: from 1 to :data:`LEVELS`, which ``highest`` gets."""
    return min(LEVELS, max(1, round(LEVELS * weight / highest)))


def _bars(histogram: Sequence[int]) -> str:
    """The heights of the bars, one digit from 0 to 9 each; at least 1 for a bin that is not empty."""
    highest = max(histogram, default=0)
    return "".join(str(0 if not count else max(1, round(9 * count / highest))) for count in histogram)


def _script_hash(template: str) -> str:
    """The hash by which the page's security policy allows its own script, and no other."""
    script = template.partition("<script>")[2].partition("</script>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _short(value: float) -> float:
    return float(f"{value:.3g}")
