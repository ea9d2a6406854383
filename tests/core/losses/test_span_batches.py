"""The NPM loss of a batch, compared with a search token by token in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.losses.span_contrastive import (
    NO_KEY,
    found_spans,
    span_batch_terms,
    span_ngrams,
    stacked,
    without_spans,
)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["inner", "l2"]))
def test_starts_and_ends_are_retrieved_from_the_other_sequences(seed: int, similarity: str) -> None:
    rng = np.random.default_rng(seed)
    context = torch.from_numpy(rng.integers(0, 4, size=(3, 7)))
    special = torch.from_numpy(rng.random((3, 7)) < 0.2)
    ids, context = context.masked_fill(special, 9), context.masked_fill(special, NO_KEY)
    rows = []
    for _ in range(4):
        length = int(rng.integers(1, 4))
        sequence, query_start, query_end, start = (int(rng.integers(most)) for most in (3, 5, 5, 7 - length))
        rows.append((sequence, query_start, query_end, start, length))
    names = ("sequence", "query_start", "query_end", "start", "length")
    spans = dict(zip(names, torch.tensor(rows).unbind(dim=1), strict=True))
    features, key_features = torch.from_numpy(rng.normal(size=(2, 3, 7, 5)))
    keys = key_features[context != NO_KEY]
    terms = span_batch_terms(
        *(features, keys, context, spans, span_ngrams(ids, spans)), similarity=similarity, temperature=0.7
    )
    losses = {"start": 0.0, "end": 0.0}
    for sequence, query_start, query_end, start, length in rows:
        ngram = ids[sequence, start : start + length].tolist()
        for end, place in (("start", query_start), ("end", query_end)):
            query, scores, positive = features[sequence, place], [], []
            for other in range(3):
                for t in range(7):
                    if other == sequence or context[other, t] == NO_KEY:
                        continue
                    key = key_features[other, t]
                    score = (key * query).sum() if similarity == "inner" else -(key - query).square().sum()
                    scores.append(float(score) / 0.7)
                    first = t if end == "start" else t - length + 1
                    positive.append(first >= 0 and context[other, first : first + length].tolist() == ngram)
            if any(positive):
                chosen = [score for score, good in zip(scores, positive, strict=True) if good]
                losses[end] += np.logaddexp.reduce(scores) - np.logaddexp.reduce(chosen)
    for name, wanted in losses.items():
        assert math.isclose(float(terms[name].loss), wanted, rel_tol=1e-9, abs_tol=1e-9)
    counts = found_spans(terms)
    assert int(counts["num_found"]) <= min(int(counts["num_starts_found"]), int(counts["num_ends_found"]))


def test_single_tokens_have_no_ends_and_no_spans_no_loss() -> None:
    context = torch.tensor([[1, 2], [2, 1]])
    spans = {name: torch.tensor([0]) for name in ("sequence", "query_start", "query_end", "start")}
    spans["length"] = torch.tensor([1])
    features = torch.randn(2, 2, 3, requires_grad=True)
    terms = span_batch_terms(features, features.flatten(0, 1), context, spans, span_ngrams(context, spans), single=True)
    assert list(terms) == ["start"]
    assert bool(terms["start"].has_positive.all())
    none = without_spans(spans)
    terms = span_batch_terms(features, features.flatten(0, 1), context, none, span_ngrams(context, none))
    assert float(terms["start"].loss) == float(terms["end"].loss) == 0


@pytest.mark.parametrize("widths", [(3, 5), (5, 3), (4, 4)])
def test_both_batches_lie_below_each_other(widths: tuple[int, int]) -> None:
    masked, context = (torch.full((2, width), 7) for width in widths)
    both = stacked(masked, context, 1)
    assert both.shape == (4, max(widths))
    assert (both[:2] == 7).sum() == masked.numel()
    assert (both[2:] == 7).sum() == context.numel()
    assert bool(((both == 7) | (both == 1)).all())
