"""Scores against a slow oracle in float64 and against bm25s, and the ranking of any scores."""

from __future__ import annotations

import math
from pathlib import Path

import bm25s
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.search.bm25 import OF_CODES, OF_WORDS, TermScores, Weighting, best, fused, write_term_scores

TERMS = 12


def random_counts(documents: int, seed: int, *, whole: bool = False) -> sp.csr_matrix:
    rng = np.random.default_rng(seed)
    counts = rng.random((documents, TERMS)) * 4 * (rng.random((documents, TERMS)) < 0.4)
    return sp.csr_matrix(np.ceil(counts) if whole else counts, dtype=np.float32)


def slow_scores(counts: np.ndarray, query: dict[int, float], weighting: Weighting) -> list[float]:
    """As the formula has it."""
    number = len(counts)
    mean = counts.sum() / number
    scores = []
    for row in counts.astype(float):
        total = 0.0
        for term, weight in query.items():
            having = sum(1 for other in counts if other[term] > 0)
            rarity = math.log(1 + (number - having + 0.5) / (having + 0.5))
            norm = weighting.saturation * (1 - weighting.length_penalty * (1 - row.sum() / mean))
            total += weight * rarity * row[term] * (weighting.saturation + 1) / (row[term] + norm) if row[term] else 0.0
        scores.append(total)
    return scores


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(0, 1000), st.integers(1, 30), st.sampled_from([OF_WORDS, OF_CODES]))
def test_scores_are_those_of_the_formula_whatever_the_shards(
    tmp_path_factory: pytest.TempPathFactory, documents: int, seed: int, size: int, weighting: Weighting
) -> None:
    folder = tmp_path_factory.mktemp("scores")
    counts = random_counts(documents, seed)
    shards = [counts[first : first + size] for first in range(0, documents, size)]
    write_term_scores(folder, "codes", TERMS, lambda: iter(shards), weighting)
    written = TermScores.open(folder, "codes", documents)
    query = {
        term: float(weight) for term, weight in enumerate(np.random.default_rng(seed).random(TERMS)) if weight > 0.4
    }
    terms, weights = np.array(list(query), dtype=int), np.array(list(query.values()))
    scores = written.of_query(terms, weights)
    np.testing.assert_allclose(scores, slow_scores(counts.toarray(), query, weighting), rtol=1e-4, atol=1e-6)
    for document in range(documents):
        parts = written.of_document(document, terms)
        assert float(parts @ weights) == pytest.approx(scores[document], abs=1e-4)


def test_whole_counts_rank_as_in_bm25s(tmp_path: Path) -> None:
    counts = random_counts(50, 3, whole=True)
    write_term_scores(tmp_path, "words", TERMS, lambda: iter([counts]), OF_WORDS)
    scores = TermScores.open(tmp_path, "words", 50).of_query(np.array([2, 5]), np.ones(2))
    documents = [[term for term in range(TERMS) for _ in range(int(row[term]))] for row in counts.toarray()]
    vocabulary = {str(term): term for term in range(TERMS)}
    index = bm25s.BM25(k1=OF_WORDS.saturation, b=OF_WORDS.length_penalty)
    index.index((documents, vocabulary), show_progress=False)
    theirs = index.get_scores_from_ids([2, 5])
    # bm25s leaves out the constant factor k1 + 1 in the method "lucene"
    np.testing.assert_allclose(scores, theirs * (OF_WORDS.saturation + 1), rtol=1e-5)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=20), st.integers(1, 25))
def test_the_best_are_those_of_a_full_sort(scores: list[float], count: int) -> None:
    ranked = sorted((-score, place) for place, score in enumerate(scores) if score > 0)[:count]
    assert best(np.array(scores, dtype=np.float32), count).tolist() == [place for _, place in ranked]


def test_a_document_in_both_rankings_comes_first() -> None:
    rankings = [np.array([3, 1]), np.array([2, 1])]
    assert [document for document, _ in fused(rankings, 3)] == [1, 2, 3]
    assert fused([np.array([], dtype=int)], 3) == []


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    write_term_scores(tmp_path, "codes", TERMS, lambda: iter([random_counts(5, 1)]), OF_CODES)
    (tmp_path / "codes.scores.npy").write_bytes(b"no")
    with pytest.raises(ValueError, match="build the index again"):
        TermScores.open(tmp_path, "codes", 5)
