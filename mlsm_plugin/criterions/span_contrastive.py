"""The NPM loss: a masked span is found by its two ends among the tokens of other sequences (Min et al., 2022)."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from torch import Tensor

from mlsm_plugin.criterions.logged_means import BIT, LoggedMeans
from mlsm_plugin.data.token_blocks import is_content
from mlsm_plugin.rank_gather import gather_rows, gather_rows_with_gradient, largest_over_ranks, rank_group

SIMILARITIES = ("inner", "l2")
# Scores that are computed at once.
CHUNK_ENTRIES = 1 << 22
CHUNK_ENTRIES_GPU = 1 << 26


def span_contrastive_loss(
    queries: Tensor,
    keys: Tensor,
    positives: Tensor,
    candidates: Tensor,
    *,
    similarity: str = "inner",
    temperature: Optional[float] = None,  # noqa: UP045
) -> Tensor:
    """Sum over the queries of -log(sum over positives of exp(score) / sum over candidates of exp(score)).

    The score of a query and a key is their inner product, or minus their squared distance, divided by the temperature.
    No (n, m) matrix of scores is kept; the gradient is computed on the way.

    Args:
        queries: ``(n, d)``, any floating dtype.
        keys: ``(m, d)``.
        positives: ``(n, m)`` bool; only those that are candidates count. A query without any contributes nothing.
        candidates: ``(n, m)`` bool.
        similarity: ``inner`` or ``l2``.
        temperature: positive; None means sqrt(d).

    Returns:
        float32 scalar (float64 for float64 queries), in nats.

    Raises:
        ValueError: the shapes do not belong together, or there is no such similarity or temperature.

    Reference:
        Min et al., "Nonparametric Masked Language Modeling", 2022.
    """
    return span_contrastive_terms(
        queries, keys, positives, candidates, similarity=similarity, temperature=temperature
    ).loss


class SpanTerms(NamedTuple):
    """Attributes:

    loss: summed loss, float32 scalar with gradient.
    found: ``(n,)`` bool, queries whose best candidate is a positive.
    counted: ``(n,)`` bool, queries with a positive.
    """

    loss: Tensor
    found: Tensor
    counted: Tensor


def span_contrastive_terms(
    queries: Tensor,
    keys: Tensor,
    positives: Tensor,
    candidates: Tensor,
    *,
    similarity: str = "inner",
    temperature: Optional[float] = None,  # noqa: UP045
) -> SpanTerms:
    """:func:`span_contrastive_loss` and what is logged beside it."""
    expected = (len(queries), len(keys))
    if queries.dim() != 2 or keys.dim() != 2 or queries.size(1) != keys.size(1):
        raise ValueError(f"expected queries (n, d) and keys (m, d), got {tuple(queries.shape)} and {tuple(keys.shape)}")
    if positives.shape != expected or candidates.shape != expected:
        raise ValueError(
            f"expected positives and candidates {expected}, got {tuple(positives.shape)} and {tuple(candidates.shape)}"
        )
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity must be one of {', '.join(SIMILARITIES)}, got {similarity}")
    temperature = math.sqrt(queries.size(1)) if temperature is None else temperature
    if not temperature > 0:
        raise ValueError(f"the temperature must be positive, got {temperature}")
    with torch.autocast(queries.device.type, enabled=False):  # --amp would round the scores
        return SpanTerms(*_SpanLoss.apply(queries, keys, positives, candidates, similarity, temperature))


class _SpanLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass, some rows of the score matrix at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        positives: Tensor,
        candidates: Tensor,
        similarity: str,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, found, counted."""
        dtype = torch.promote_types(queries.dtype, torch.float32)
        q, k = queries.detach().to(dtype), keys.detach().to(dtype)
        with_gradient = any(ctx.needs_input_grad[:2])
        q_gradient, k_gradient = torch.zeros_like(q), torch.zeros_like(k)
        total = q.new_zeros((), dtype=torch.float64)
        found = torch.zeros(len(q), dtype=torch.bool, device=q.device)
        counted = torch.zeros_like(found)
        entries = CHUNK_ENTRIES if q.device.type == "cpu" else CHUNK_ENTRIES_GPU
        for start in range(0, len(q), max(1, entries // max(1, len(k)))):
            rows = slice(start, start + max(1, entries // max(1, len(k))))
            positive = positives[rows] & candidates[rows]
            has = positive.any(dim=1)
            scores = _scores(q[rows], k, similarity).div_(temperature).masked_fill_(~candidates[rows], -math.inf)
            of_positives = scores.masked_fill(~positive, -math.inf)
            all_sum, positive_sum = scores.logsumexp(dim=1), of_positives.logsumexp(dim=1)
            total += (all_sum - positive_sum)[has].sum()
            counted[rows] = has
            if len(k):
                found[rows] = positive.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1) & has
            if with_gradient:
                # of the scores: softmax over the candidates minus softmax over the positives
                pull = (scores - all_sum[:, None]).exp_().sub_((of_positives - positive_sum[:, None]).exp_())
                pull = pull.masked_fill_(~has[:, None], 0.0).div_(temperature)
                if similarity == "inner":
                    q_gradient[rows] = pull @ k
                    k_gradient.addmm_(pull.T, q[rows])
                else:  # of -(q - k)^2; the rows of `pull` sum to 0
                    q_gradient[rows] = 2 * (pull @ k)
                    k_gradient += 2 * (pull.T @ q[rows] - pull.sum(dim=0)[:, None] * k)
        ctx.save_for_backward(q_gradient, k_gradient)
        ctx.dtypes = (queries.dtype, keys.dtype)
        ctx.mark_non_differentiable(found, counted)
        return total.to(dtype), found, counted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *unused: Any) -> tuple[Optional[Tensor], ...]:  # noqa: UP045
        """Scale what the forward pass computed."""
        q_gradient, k_gradient = ctx.saved_tensors
        q_dtype, k_dtype = ctx.dtypes
        return (q_gradient * gradient).to(q_dtype), (k_gradient * gradient).to(k_dtype), None, None, None, None


def _scores(q: Tensor, k: Tensor, similarity: str) -> Tensor:
    products = q @ k.T
    if similarity == "inner":
        return products
    return products.mul_(2).sub_(q.square().sum(dim=1)[:, None]).sub_(k.square().sum(dim=1))


def occurrences(tokens: Tensor, ngrams: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Where n-grams begin and end in sequences.

    Args:
        tokens: ``(S, T)`` ids, negative where nothing may match.
        ngrams: ``(n, L)`` ids; row i counts up to its length.
        lengths: ``(n,)``, from 1 to L.

    Returns:
        begins and ends, ``(n, S, T)`` bool: at the first and at the last token of each occurrence.
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


@dataclass
class SpanContrastiveConfig(FairseqDataclass):
    """The task has the options."""


@register_criterion("span_contrastive", dataclass=SpanContrastiveConfig)
class SpanContrastiveCriterion(FairseqCriterion):
    """The sum of the losses of a span's start and end, a mean over the spans."""

    def __init__(self, cfg: SpanContrastiveConfig, task: Any) -> None:
        super().__init__(task)
        if not hasattr(task.cfg, "span_mode"):
            raise ValueError("--criterion span_contrastive needs --task nonparametric_masked_lm, which has its options")
        self.cfg = task.cfg
        self.dictionary = task.source_dictionary
        self.single = str(task.cfg.span_mode) == "single"
        self.masks = sorted({task.mask_idx, *task.span_masks})

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """Loss summed over spans, sample size, logging output."""
        features, key_features, key_tokens = self._encode(model, sample)
        content = self._is_content(key_tokens)
        spans = sample["spans"]
        if sample.get("is_dummy"):  # it stands in where a rank has no batch left
            content = torch.zeros_like(content)
            spans = {name: values[:0] for name, values in spans.items()}
        keys, tokens, first = self._gathered(key_features, key_tokens.masked_fill(~content, -1), content)
        column = (tokens >= 0).flatten()
        sequence_of_key = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens.size(1))[column]
        candidates = sequence_of_key != (spans["sequence"] + first)[:, None]  # (n, m)
        begins, ends = occurrences(tokens, self._ngrams(sample, spans), spans["length"])
        how = {"similarity": str(self.cfg.similarity), "temperature": self.cfg.similarity_temperature}
        queries = features[spans["sequence"], spans["query_start"]]
        start = span_contrastive_terms(queries, keys, begins.flatten(1)[:, column], candidates, **how)
        terms = {"start": start}
        if not self.single:
            queries = features[spans["sequence"], spans["query_end"]]
            terms["end"] = span_contrastive_terms(queries, keys, ends.flatten(1)[:, column], candidates, **how)
        loss = sum((term.loss for term in terms.values()), start=_zero_with_gradient(model.encoder.lm_head))
        sample_size = start.counted.sum()
        logging_output = {
            "loss": loss.detach(),
            "sample_size": sample_size,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "num_groups": sample["num_groups"],
            "num_groups_without_spans": sample["num_groups_without_spans"],
            "num_spans": len(spans["length"]),
            "num_masked": spans["length"].sum(),
            "num_content": self._is_content(sample["context"]["src_tokens"]).sum(),
            "num_found": torch.stack([term.found for term in terms.values()]).all(dim=0).sum(),
        }
        for name, term in terms.items():
            logging_output[f"{name}_loss"] = term.loss.detach()
            logging_output[f"num_{name}s_found"] = term.found.sum()
        return loss, sample_size, logging_output

    def _is_content(self, tokens: Tensor) -> Tensor:
        """Which tokens are neither BOS, EOS, padding nor masks."""
        content = is_content(tokens, self.dictionary)
        for mask in self.masks:
            content &= tokens != mask
        return content

    def _encode(self, model: Any, sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of the masked sequences, and hidden states and ids of those that hold the keys."""
        masked, context = sample["net_input"]["src_tokens"], sample["context"]["src_tokens"]
        if sample["mask_context"]:
            features = model(masked, features_only=True)[0]
            return features, features, masked
        width = max(masked.size(1), context.size(1))
        both = masked.new_full((2 * len(masked), width), self.padding_idx)
        both[: len(masked), : masked.size(1)] = masked
        both[len(masked) :, : context.size(1)] = context
        features, key_features = model(both, features_only=True)[0].chunk(2)
        return features, key_features[:, : context.size(1)], context

    def _gathered(self, key_features: Tensor, tokens: Tensor, content: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys ``(m, d)``, ids of all sequences ``(S, T)``, -1 where there is no key, and the first own sequence."""
        keys = key_features[content]
        if not self.cfg.negatives_across_ranks:
            return keys, tokens, 0
        group = rank_group(self.cfg.negative_group_size)
        width = int(largest_over_ranks(torch.tensor([tokens.size(1)], device=tokens.device), group))
        tokens, first = gather_rows(torch.nn.functional.pad(tokens, (0, width - tokens.size(1)), value=-1), group)
        return gather_rows_with_gradient(keys, group)[0], tokens, first

    def _ngrams(self, sample: dict[str, Any], spans: dict[str, Tensor]) -> Tensor:
        """The ids of each span ``(n, longest)``; those behind its length do not count."""
        context, lengths = sample["context"]["src_tokens"], spans["length"]
        if len(lengths) == 0:
            return context.new_zeros(0, 1)
        offsets = torch.arange(int(lengths.max()), device=context.device)
        places = (spans["start"][:, None] + offsets).clamp(max=context.size(1) - 1)
        return context[spans["sequence"][:, None], places]

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over the spans of all workers; losses in bits (base 2) as fairseq does."""
        means = LoggedMeans(logging_outputs)
        counted, groups = means.total("sample_size"), means.total("num_groups")
        means.log("loss", "loss", counted, unit=BIT)
        for end in ("start", "end"):
            if means.has(f"{end}_loss"):
                means.log(f"{end}_loss", f"{end}_loss", counted, unit=BIT)
                means.log(f"{end}_accuracy", f"num_{end}s_found", counted)
        means.log("accuracy", "num_found", counted)
        means.log("spans_per_group", "num_spans", groups)
        means.log("span_length", "num_masked", means.total("num_spans"))
        means.log("masked_share", "num_masked", means.total("num_content"))
        means.log("groups_without_spans", "num_groups_without_spans", groups)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def _zero_with_gradient(module: torch.nn.Module) -> Tensor:
    """Zero, with a (zero) gradient for parameters that are not used: DistributedDataParallel asks for all of them."""
    return sum(parameter.view(-1)[0] * 0.0 for parameter in module.parameters() if parameter.requires_grad)  # type: ignore[return-value]
