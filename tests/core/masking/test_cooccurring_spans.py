"""The spans that NPM masks; a slow check verifies each rule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mlsm_plugin.core.masking.span_groups import SpanRules, sample_spans
from mlsm_plugin.core.masking.word_boundaries import PieceClasses
from tests.core.masking.slow_boundaries import slow_boundaries

Span = tuple[int, int, int]


def slow_candidates(sequences: list[np.ndarray], pieces: PieceClasses, rules: SpanRules) -> dict[Span, tuple[int, ...]]:
    """All spans that may be masked, whatever else is, with their tokens."""
    where: dict[tuple[int, ...], set[int]] = {}
    found: dict[Span, tuple[int, ...]] = {}
    for number, tokens in enumerate(sequences):
        begins, ends = slow_boundaries(tokens, pieces, rules.max_length)
        for start in range(len(tokens)):
            for length in range(1, rules.max_length + 1):
                part = tuple(int(token) for token in tokens[start : start + length])
                if len(part) < length or pieces.special[list(part)].any() or not begins[start]:
                    break
                where.setdefault(part, set()).add(number)
                allowed = length == 1 or not pieces.sentence_punctuation[part[0]]
                if ends[start + length - 1] and allowed:
                    found[number, start, length] = part
    return {span: part for span, part in found.items() if len(where[part]) > 1}


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[np.ndarray], PieceClasses, SpanRules]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocabulary = draw(st.integers(3, 14))
    pieces = PieceClasses(
        special=rng.random(vocabulary) < 0.15,
        begins_word=rng.random(vocabulary) < draw(st.sampled_from([0.4, 0.9, 1.0])),
        ends_word=rng.random(vocabulary) < draw(st.sampled_from([0.0, 0.0, 0.5])),
        punctuation=(punctuation := rng.random(vocabulary) < 0.3),
        sentence_punctuation=punctuation & (rng.random(vocabulary) < 0.6),
    )
    number = draw(st.integers(0, 5))
    sequences = [rng.integers(vocabulary, size=draw(st.integers(0, 30))) for _ in range(number)]
    rules = SpanRules(
        mask_prob=draw(st.sampled_from([0.1, 0.3, 1.0])),
        length_p=draw(st.sampled_from([0.2, 0.5, 1.0])),
        max_length=draw(st.integers(1, 6)),
        punctuation_prob=draw(st.sampled_from([0.0, 1.0])),
        max_ngram_masks=draw(st.integers(1, 4)),
        max_spans_per_sequence=draw(st.integers(1, 8)),
    )
    return sequences, pieces, rules


def takeable(
    span: Span, part: tuple[int, ...], taken: list[Span], candidates: dict[Span, Any], rules: SpanRules
) -> bool:
    """Whether a further span keeps to all rules but the budget."""
    sequence, start, length = span
    own = [other for other in taken if other[0] == sequence]
    overlaps = any(start < other[1] + other[2] and other[1] < start + length for other in own)
    masks = sum(candidates[other] == part for other in taken)
    return not overlaps and len(own) < rules.max_spans_per_sequence and masks < rules.max_ngram_masks


@settings(max_examples=150, deadline=None)
@given(groups(), st.integers(0, 10**6))
def test_spans_keep_to_every_rule_and_none_is_left_that_could_be_taken(group: Any, seed: int) -> None:
    sequences, pieces, rules = group
    spans = sample_spans(sequences, pieces=pieces, rules=rules, rng=np.random.default_rng(seed))
    assert spans == sorted(spans)
    candidates = slow_candidates(sequences, pieces, rules)
    if rules.punctuation_prob == 0:
        candidates = {
            span: part for span, part in candidates.items() if len(part) > 1 or not pieces.punctuation[part[0]]
        }
    for number, span in enumerate(spans):
        assert span in candidates
        assert takeable(span, candidates[span], spans[:number], candidates, rules)
    content = sum(int((~pieces.special[tokens]).sum()) for tokens in sequences)
    left = round(rules.mask_prob * content) - sum(length for _, _, length in spans)
    assert left >= 0
    assert not any(
        span[2] <= left and takeable(span, part, spans, candidates, rules) for span, part in candidates.items()
    )


def of_words(num: int, *, punctuation: tuple[int, ...] = ()) -> PieceClasses:
    """Ids that are words, 0 to 2 special."""
    mark = np.isin(np.arange(num), punctuation)
    return PieceClasses(np.arange(num) < 3, np.ones(num, bool), np.zeros(num, bool), mark, mark)


def test_lengths_are_geometric_where_all_are_to_be_had() -> None:
    text = np.random.default_rng(0).integers(3, 5000, size=3000)
    rules = SpanRules(mask_prob=0.05, max_length=4, max_spans_per_sequence=1000)
    lengths: Counter[int] = Counter()
    for seed in range(20):
        spans = sample_spans([text, text], pieces=of_words(5000), rules=rules, rng=np.random.default_rng(seed))
        lengths.update(length for _, _, length in spans[:-1])
    expected = np.array([0.5, 0.25, 0.125, 0.125]) * lengths.total()
    assert stats.chisquare([lengths[i] for i in (1, 2, 3, 4)], expected).pvalue > 1e-3


def test_spans_of_one_length_are_drawn_uniformly() -> None:
    text = np.arange(3, 43)
    rules = SpanRules(mask_prob=0.05, max_length=1)
    starts: Counter[Span] = Counter()
    for seed in range(1500):
        starts.update(sample_spans([text, text], pieces=of_words(43), rules=rules, rng=np.random.default_rng(seed)))
    assert len(starts) == 80
    assert stats.chisquare(list(starts.values())).pvalue > 1e-3


def test_single_punctuation_is_masked_with_its_probability_and_begins_no_longer_span() -> None:
    text = np.array([3, 4] * 400)  # 4 is punctuation
    rules = SpanRules(
        mask_prob=1, punctuation_prob=0.1, max_length=1, max_ngram_masks=10**6, max_spans_per_sequence=10**6
    )
    spans = sample_spans([text, text], pieces=of_words(5, punctuation=(4,)), rules=rules, rng=np.random.default_rng(1))
    masked = Counter(int(text[start]) for _, start, _ in spans)
    assert masked[3] == 800
    assert stats.binomtest(masked[4], 800, 0.1).pvalue > 1e-3


def test_the_generator_decides() -> None:
    text = np.random.default_rng(0).integers(3, 50, size=200)
    draws = [
        sample_spans([text, text], pieces=of_words(50), rules=SpanRules(), rng=np.random.default_rng(seed))
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("sequences", [[], [[]], [[], []], [[3, 4, 5, 3, 4, 5]], [[0, 1], [0, 1]], [[3], [4]]])
def test_where_nothing_is_shared_nothing_is_masked(sequences: list[list[int]]) -> None:
    arrays = [np.array(tokens, np.int64) for tokens in sequences]
    assert sample_spans(arrays, pieces=of_words(6), rules=SpanRules(mask_prob=1), rng=np.random.default_rng()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("mask_prob", 0), ("mask_prob", 1.1), ("length_p", 0), ("max_length", 0), ("punctuation_prob", -0.1),
     ("max_ngram_masks", 0), ("max_spans_per_sequence", 0)],
)  # fmt: skip
def test_rules_without_meaning_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        SpanRules(**{name: value})
