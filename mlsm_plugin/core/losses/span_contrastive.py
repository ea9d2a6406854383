"""The NPM loss: the two ends of a masked span are retrieved from the tokens of other sequences.

Min et al., "Nonparametric Masked Language Modeling", 2022.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIMILARITIES = ("inner", "l2")
NO_KEY = -1
# maximum number of scores that are computed at once
CHUNK_ENTRIES = 1 << 22
CHUNK_ENTRIES_GPU = 1 << 26


def similarities(queries: Tensor, keys: Tensor, similarity: str) -> Tensor:
    """The scores ``(n, m)`` of all pairs: ``inner`` products, or negative squared ``l2`` distances.

    Queries are ``(n, d)``, keys ``(m, d)``, both of one dtype; more similar pairs have larger scores.
    """
    products = queries @ keys.T
    if similarity == "inner":
        return products
    return products.mul_(2).sub_(queries.square().sum(dim=1)[:, None]).sub_(keys.square().sum(dim=1))


def check_similarity(similarity: str, temperature: float | None) -> None:
    """Raise ValueError if an option of the similarity is out of range."""
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity must be one of {', '.join(SIMILARITIES)}, got {similarity}")
    if temperature is not None and not temperature > 0:
        raise ValueError(f"similarity temperature must be positive, got {temperature}")


def similarity_of(cfg: Any) -> str:
    """The similarity that a model was trained with; ``cfg`` is the whole configuration in its checkpoint."""
    return str(getattr(cfg.criterion, "similarity", None) or "inner")


def temperature_of(cfg: Any, dim: int, *, closed_set: bool = False) -> float:
    """The temperature that a model of width ``dim`` was trained with; ``cfg`` is as in :func:`similarity_of`.

    With a ``closed_set`` of candidates, it is the temperature of zero-shot classification.
    """
    flatter = float(getattr(cfg.criterion, "closed_set_temperature", None) or 1.0) if closed_set else 1.0
    return flatter * (getattr(cfg.criterion, "similarity_temperature", None) or math.sqrt(dim))


class SpanTerms(NamedTuple):
    """The loss in nats, and figures to log, ``(n,)`` each."""

    loss: Tensor  # summed, float32 scalar with gradient
    losses: Tensor  # loss of each query, 0 without positives
    correct: Tensor  # bool, whether the best candidate of a query is a positive
    has_positive: Tensor  # bool, whether a query has positives


def span_contrastive_terms(
    queries: Tensor,
    keys: Tensor,
    positives: Tensor,
    candidates: Tensor,
    *,
    similarity: str = "inner",
    temperature: float | None = None,
) -> SpanTerms:
    """The sum over queries of -log(sum over positives of exp(score) / sum over candidates of exp(score)).

    The score of a query and a key is their inner product, or their negative squared distance, divided by the
    temperature. The gradient is computed in the forward pass, so no (n, m) matrix of scores is kept. ValueError if the
    shapes do not fit together, or the similarity or the temperature is invalid.

    Args:
        queries: ``(n, d)``, any floating dtype.
        keys: ``(m, d)``.
        positives: ``(n, m)`` bool; only positives that are candidates count. A query without positives contributes 0.
        candidates: ``(n, m)`` bool.
        similarity: ``inner`` or ``l2``.
        temperature: a positive number; None: sqrt(d).

    The loss is in float32, or float64 for float64 queries.
    """
    expected = (len(queries), len(keys))
    if queries.dim() != 2 or keys.dim() != 2 or queries.size(1) != keys.size(1):
        raise ValueError(f"expected queries (n, d) and keys (m, d), got {tuple(queries.shape)} and {tuple(keys.shape)}")
    if positives.shape != expected or candidates.shape != expected:
        raise ValueError(
            f"expected positives and candidates {expected}, got {tuple(positives.shape)} and {tuple(candidates.shape)}"
        )
    check_similarity(similarity, temperature)
    temperature = math.sqrt(queries.size(1)) if temperature is None else temperature
    with torch.autocast(queries.device.type, enabled=False):  # --amp would round the scores
        return SpanTerms(*_SpanLoss.apply(queries, keys, positives, candidates, similarity, temperature))


class _SpanLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass, for a number of rows of the score matrix at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        positives: Tensor,
        candidates: Tensor,
        similarity: str,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(queries.dtype, torch.float32)
        q = queries.detach().to(dtype)
        k = keys.detach().to(dtype)
        with_gradient = any(ctx.needs_input_grad[:2])
        q_gradient = torch.zeros_like(q)
        k_gradient = torch.zeros_like(k)
        total = q.new_zeros((), dtype=torch.float64)
        losses = q.new_zeros(len(q))
        retrieved = torch.zeros(len(q), dtype=torch.bool, device=q.device)
        counted = torch.zeros_like(retrieved)
        entries = CHUNK_ENTRIES if q.device.type == "cpu" else CHUNK_ENTRIES_GPU
        rows_at_once = max(1, entries // max(1, len(k)))
        for start in range(0, len(q), rows_at_once):
            rows = slice(start, start + rows_at_once)
            positive = positives[rows] & candidates[rows]
            has = positive.any(dim=1)
            scores = similarities(q[rows], k, similarity).div_(temperature).masked_fill_(~candidates[rows], -math.inf)
            of_positives = scores.masked_fill(~positive, -math.inf)
            all_sum = scores.logsumexp(dim=1)
            positive_sum = of_positives.logsumexp(dim=1)
            losses[rows][has] = (all_sum - positive_sum)[has]
            total += losses[rows][has].sum()
            counted[rows] = has
            if len(k):
                retrieved[rows] = positive.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1) & has
            if with_gradient:
                # gradient of the scores: softmax over the candidates minus softmax over the positives
                pull = (scores - all_sum[:, None]).exp_().sub_((of_positives - positive_sum[:, None]).exp_())
                pull = pull.masked_fill_(~has[:, None], 0.0).div_(temperature)
                if similarity == "inner":
                    q_gradient[rows] = pull @ k
                    k_gradient.addmm_(pull.T, q[rows])
                else:  # derivative of -(q - k)^2; the rows of `pull` sum to 0
                    q_gradient[rows] = 2 * (pull @ k)
                    k_gradient += 2 * (pull.T @ q[rows] - pull.sum(dim=0)[:, None] * k)
        ctx.save_for_backward(q_gradient, k_gradient)
        ctx.dtypes = (queries.dtype, keys.dtype)
        ctx.mark_non_differentiable(losses, retrieved, counted)
        return total.to(dtype), losses, retrieved, counted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        q_gradient, k_gradient = ctx.saved_tensors
        q_dtype, k_dtype = ctx.dtypes
        return (q_gradient * gradient).to(q_dtype), (k_gradient * gradient).to(k_dtype), None, None, None, None


def occurrences(tokens: Tensor, ngrams: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Where n-grams begin and end in sequences: two ``(n, S, T)`` bool, True at the first and last token of a match.

    Args:
        tokens: ``(S, T)`` ids; negative ids match nothing.
        ngrams: ``(n, L)`` ids; ids of a row beyond its length are ignored.
        lengths: ``(n,)``, from 1 to L.
    """
    num_sequences, width = tokens.shape
    begins = torch.zeros(len(ngrams), num_sequences, width, dtype=torch.bool, device=tokens.device)
    ends = torch.zeros_like(begins)
    for length in lengths.unique().tolist():
        if length > width:
            continue
        rows = (lengths == length).nonzero().squeeze(1)
        room = width - length + 1
        match = torch.ones(len(rows), num_sequences, room, dtype=torch.bool, device=tokens.device)
        for offset in range(length):
            match &= tokens[None, :, offset : offset + room] == ngrams[rows, offset, None, None]
        begins[rows, :, :room] = match
        ends[rows, :, length - 1 :] = match
    return begins, ends


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
    """The losses of the ``start`` of the spans and, unless ``single``, of their ``end``, by these names.

    Args:
        features: ``(B, T', d)`` hidden states of the masked sequences.
        keys: ``(m, d)`` hidden states of the tokens that can be retrieved.
        tokens: ``(S, T)`` ids of the sequences with the keys, in the same order; :data:`NO_KEY` for tokens without key.
        spans: ``(n,)`` each: the ``sequence`` of a span, the positions ``query_start`` and ``query_end`` of its masks
            in the masked sequence, and its ``length``.
        ngrams: ``(n, L)`` ids of each span; ids beyond its length do not count.
        first: index of the first of the ``B`` sequences among the ``S``.
        single: a span is one token with one mask.
        similarity, temperature: as for :func:`span_contrastive_terms`.
    """
    column = (tokens != NO_KEY).flatten()
    sequence_of_key = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens.size(1))[column]
    candidates = sequence_of_key != (spans["sequence"] + first)[:, None]  # (n, m)
    places = dict(zip(("start", "end"), occurrences(tokens, ngrams, spans["length"]), strict=True))
    if single:
        del places["end"]
    terms = {}
    for name, occurs in places.items():
        queries = features[spans["sequence"], spans[f"query_{name}"]]
        positives = occurs.flatten(1)[:, column]
        terms[name] = span_contrastive_terms(
            queries, keys, positives, candidates, similarity=similarity, temperature=temperature
        )
    return terms


def span_ngrams(context: Tensor, spans: dict[str, Tensor]) -> Tensor:
    """The ids ``(n, longest)`` of each span in unmasked ids ``(B, T)``; ids beyond its length do not count.

    ``spans`` has the ``sequence``, ``start`` and ``length`` of each span, ``(n,)``.
    """
    lengths = spans["length"]
    if len(lengths) == 0:
        return context.new_zeros(0, 1)
    offsets = torch.arange(int(lengths.max()), device=context.device)
    places = (spans["start"][:, None] + offsets).clamp(max=context.size(1) - 1)
    return context[spans["sequence"][:, None], places]


def without_spans(spans: dict[str, Tensor]) -> dict[str, Tensor]:
    """``spans``, emptied."""
    return {name: values[:0] for name, values in spans.items()}


def stacked(masked: Tensor, context: Tensor, pad: int) -> Tensor:
    """Two batches of ids ``(B, T')`` and ``(B, T)``, stacked and right-padded for one forward pass."""
    width = max(masked.size(1), context.size(1))
    stack = masked.new_full((2 * len(masked), width), pad)
    stack[: len(masked), : masked.size(1)] = masked
    stack[len(masked) :, : context.size(1)] = context
    return stack


def found_spans(terms: dict[str, SpanTerms]) -> dict[str, Tensor]:
    """How many spans were retrieved: ``num_starts_found``, ``num_ends_found`` if there are ends, ``num_found``."""
    counts = {f"num_{name}s_found": term.correct.sum() for name, term in terms.items()}
    return {**counts, "num_found": torch.stack([term.correct for term in terms.values()]).all(dim=0).sum()}
