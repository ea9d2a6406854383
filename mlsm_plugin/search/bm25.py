"""BM25 (Robertson and Zaragoza 2009) over terms with fractional counts, in memory-mapped files of any size.

The score of each term in each document is computed once (Lù 2024, "BM25S"); a query then only sums a few columns.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import write_npy
from mlsm_plugin.search.documents import damaged, mapped

FUSION = 10  # k of reciprocal rank fusion: the larger, the less the top ranks differ; the usual 60 is a bit worse here
BLOCK_DOCUMENTS = 1024  # documents converted from columns to rows at a time
PARTS = ("starts", "documents", "scores")


@dataclass(frozen=True)
class Weighting:
    """BM25's parameters.

    ``saturation`` is k1: the smaller it is, the sooner repeating a term stops raising the score. ``length_penalty`` is
    b, from 0 to 1: how strongly long documents are penalized.
    """

    saturation: float
    length_penalty: float


OF_WORDS = Weighting(1.5, 0.75)  # the usual values
OF_CODES = Weighting(4.0, 1.0)  # chosen on film reviews; see docs/research/search.md


class TermScores:
    """The scores of all terms: for each term, the numbers of its documents, ascending, and its score in each.

    Attributes:
        starts: ``(n_terms + 1,)`` int64: the entries of term ``t`` are ``starts[t]`` to ``starts[t + 1]``.
        documents: ``(n_entries,)`` int32.
        scores: ``(n_entries,)`` float32.
    """

    def __init__(self, starts: np.ndarray, documents: np.ndarray, scores: np.ndarray, num_documents: int) -> None:
        self.starts = starts
        self.documents = documents
        self.scores = scores
        self.num_documents = num_documents

    @classmethod
    def open(cls, folder: Path, name: str, num_documents: int) -> "TermScores":
        """Memory-map the files that :func:`write_term_scores` wrote; ValueError if one is missing or damaged."""
        starts = mapped(folder / f"{name}.starts.npy")
        documents = mapped(folder / f"{name}.documents.npy")
        scores = mapped(folder / f"{name}.scores.npy")
        if starts[-1] != len(documents) or len(documents) != len(scores):
            raise damaged(folder / f"{name}.starts.npy")
        return cls(starts, documents, scores, num_documents)

    def of_query(self, terms: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The score of each document, ``(num_documents,)`` float32, for a query of weighted terms."""
        total = np.zeros(self.num_documents, dtype=np.float32)
        for term, weight in zip(terms.tolist(), weights.tolist(), strict=True):
            entries = slice(self.starts[term], self.starts[term + 1])
            np.add.at(total, self.documents[entries], weight * self.scores[entries])  # three times as fast as +=
        return total

    def of_document(self, document: int, terms: np.ndarray) -> np.ndarray:
        """The score of each term in a document, ``(len(terms),)``; 0 for a term that the document lacks."""
        scores = np.zeros(len(terms), dtype=np.float32)
        for row, term in enumerate(terms.tolist()):
            start = int(self.starts[term])
            stop = int(self.starts[term + 1])
            place = start + int(np.searchsorted(self.documents[start:stop], document))
            if place < stop and self.documents[place] == document:
                scores[row] = self.scores[place]
        return scores

    def blocks_of_documents(self, size: int = BLOCK_DOCUMENTS) -> Iterator[sp.csr_matrix]:
        """Yield the scores ``(n, n_terms)``, float32, of at most ``size`` consecutive documents at a time."""
        places = np.array(self.starts[:-1])
        for first in range(0, self.num_documents, size):
            stop = min(first + size, self.num_documents)
            terms: list[np.ndarray] = []
            rows: list[np.ndarray] = []
            values: list[np.ndarray] = []
            for term, begin in enumerate(places.tolist()):
                entries = self.documents[begin : min(begin + size, int(self.starts[term + 1]))]
                count = int(np.searchsorted(entries, stop))
                places[term] += count
                terms.append(np.full(count, term))
                rows.append(entries[:count] - first)
                values.append(self.scores[begin : begin + count])
            coordinates = (np.concatenate(rows), np.concatenate(terms))
            block = sp.csr_matrix((np.concatenate(values), coordinates), shape=(stop - first, len(places)))
            block.eliminate_zeros()
            yield block


def write_term_scores(
    folder: Path, name: str, num_terms: int, counts: Callable[[], Iterable[sp.csr_matrix]], weighting: Weighting
) -> None:
    """Write the scores of documents, given their term counts.

    ``counts()`` yields the counts in shards ``(n, num_terms)``, in order; it is called twice and must yield the same.
    One shard at a time is in memory; the result is written to memory-mapped files. A document without terms scores 0
    for every query.
    """
    frequencies = np.zeros(num_terms, dtype=np.int64)
    lengths = []
    for shard in counts():
        frequencies += np.bincount(shard.indices, minlength=num_terms)
        lengths.append(np.asarray(shard.sum(axis=1), dtype=np.float64).ravel())
    length = np.concatenate(lengths)
    num_documents = len(length)
    rarity = np.log1p((num_documents - frequencies + 0.5) / (frequencies + 0.5))
    saturation = weighting.saturation
    penalty = weighting.length_penalty
    norms = saturation * (1 - penalty + penalty * length / max(float(length.mean()), 1e-12))
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    temporary = [folder / f".{name}.{part}.tmp" for part in PARTS[1:]]
    documents = np.lib.format.open_memmap(temporary[0], "w+", np.int32, (int(starts[-1]),))
    scores = np.lib.format.open_memmap(temporary[1], "w+", np.float32, (int(starts[-1]),))
    filled = starts[:-1].copy()
    first = 0
    for shard in counts():
        columns = shard.tocsc()
        rows = columns.indices + first
        values = columns.data * (saturation + 1) / (columns.data + norms[rows])
        counts_of_terms = np.diff(columns.indptr)
        places = np.repeat(filled - columns.indptr[:-1], counts_of_terms) + np.arange(columns.nnz)
        documents[places] = rows
        scores[places] = np.repeat(rarity, counts_of_terms) * values
        filled += counts_of_terms
        first += shard.shape[0]
    documents.flush()
    scores.flush()
    for path, part in zip(temporary, PARTS[1:], strict=True):
        path.replace(folder / f"{name}.{part}.npy")
    write_npy(folder / f"{name}.{PARTS[0]}.npy", starts)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """At most ``count`` documents with the highest scores above 0, best first; ties go to the earlier document."""
    count = min(count, len(scores))
    candidates = np.argpartition(-scores, count - 1)[:count] if count else np.zeros(0, dtype=np.int64)
    lowest = scores[candidates].min(initial=np.inf)
    candidates = np.flatnonzero(scores >= max(lowest, np.finfo(np.float32).tiny))
    ranked = candidates[np.argsort(-scores[candidates], kind="stable")]
    return ranked[:count]


def fused(rankings: Iterable[np.ndarray], count: int) -> list[tuple[int, float]]:
    """Merge rankings by reciprocal rank fusion (Cormack et al. 2009): documents and their fused scores, best first."""
    total: dict[int, float] = {}
    for ranking in rankings:
        for rank, document in enumerate(ranking.tolist(), 1):
            total[document] = total.get(document, 0.0) + 1 / (FUSION + rank)
    return sorted(total.items(), key=lambda item: (-item[1], item[0]))[:count]
