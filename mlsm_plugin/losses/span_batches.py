"""The NPM loss of a batch: what retrieves, what is retrieved, and where the spans occur (Min et al., 2022)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.losses.span_contrastive import SpanTerms, occurrences, span_contrastive_terms

NO_KEY = -1


def span_batch_terms(
    features: Tensor,
    keys: Tensor,
    tokens: Tensor,
    spans: dict[str, Tensor],
    ngrams: Tensor,
    *,
    first: int = 0,
    single: bool = False,
    similarity: str = "inner",
    temperature: float | None = None,
) -> dict[str, SpanTerms]:
    """The loss of the starts of the spans and, unless ``single``, of their ends.

    Args:
        features: ``(B, T', d)`` hidden states of the masked sequences.
        keys: ``(m, d)`` hidden states of the tokens that can be retrieved.
        tokens: ``(S, T)`` ids of the sequences with the keys, in the same order; :data:`NO_KEY` where there is none.
        spans: ``(n,)`` each: the ``sequence`` of a span, ``query_start`` and ``query_end``, the places of its masks in
            the masked sequence, and its ``length``.
        ngrams: ``(n, L)`` ids of each span; those after its length do not count.
        first: number among the ``S`` sequences of the first of the ``B``.
        single: a span is one token with one mask.
        similarity, temperature: as of :func:`~mlsm_plugin.losses.span_contrastive.span_contrastive_loss`.

    Returns:
        the terms by name, ``start`` and ``end``.
    """
    column = (tokens != NO_KEY).flatten()
    sequence_of_key = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens.size(1))[column]
    candidates = sequence_of_key != (spans["sequence"] + first)[:, None]  # (n, m)
    places = dict(zip(("start", "end"), occurrences(tokens, ngrams, spans["length"]), strict=True))
    if single:
        del places["end"]
    terms = {}
    for name, found in places.items():
        queries = features[spans["sequence"], spans[f"query_{name}"]]
        positives = found.flatten(1)[:, column]
        terms[name] = span_contrastive_terms(
            queries, keys, positives, candidates, similarity=similarity, temperature=temperature
        )
    return terms


def span_ngrams(context: Tensor, spans: dict[str, Tensor]) -> Tensor:
    """The ids of each span, ``(n, longest)``; ids after its length do not count.

    Args:
        context: ``(B, T)`` ids without masks.
        spans: the ``sequence``, ``start`` and ``length`` of each span in it, ``(n,)``.
    """
    lengths = spans["length"]
    if len(lengths) == 0:
        return context.new_zeros(0, 1)
    offsets = torch.arange(int(lengths.max()), device=context.device)
    places = (spans["start"][:, None] + offsets).clamp(max=context.size(1) - 1)
    return context[spans["sequence"][:, None], places]


def without_spans(spans: dict[str, Tensor]) -> dict[str, Tensor]:
    """``spans`` with none left."""
    return {name: values[:0] for name, values in spans.items()}


def stacked(masked: Tensor, context: Tensor, pad: int) -> Tensor:
    """Both batches of ids ``(B, T')`` and ``(B, T)`` below each other, right-padded, for one forward pass."""
    width = max(masked.size(1), context.size(1))
    both = masked.new_full((2 * len(masked), width), pad)
    both[: len(masked), : masked.size(1)] = masked
    both[len(masked) :, : context.size(1)] = context
    return both


def found_spans(terms: dict[str, SpanTerms]) -> dict[str, Any]:
    """How many spans were retrieved: ``num_starts_found``, ``num_ends_found`` if there are ends, ``num_found``."""
    counts = {f"num_{name}s_found": term.found.sum() for name, term in terms.items()}
    return {**counts, "num_found": torch.stack([term.found for term in terms.values()]).all(dim=0).sum()}
