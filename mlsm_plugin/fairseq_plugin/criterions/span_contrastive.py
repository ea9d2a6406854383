"""The NPM loss: the two ends of a masked span are retrieved from the tokens of other sequences (Min et al., 2022)."""

from dataclasses import dataclass
from typing import Optional

import torch
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.losses.span_contrastive import (
    NO_KEY,
    SIMILARITIES,
    check_similarity,
    found_spans,
    span_batch_terms,
    span_ngrams,
    stacked,
    without_spans,
)
from mlsm_plugin.core.losses.zero_gradients import zero_with_gradient
from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput, Sample
from mlsm_plugin.fairseq_plugin.compat.model_parts import lm_head
from mlsm_plugin.fairseq_plugin.compat.rank_gather import (
    gather_rows,
    gather_rows_with_gradient,
    largest_over_ranks,
    rank_group,
)
from mlsm_plugin.fairseq_plugin.criterions.logged_means import BIT, LoggedMeans, SummedCriterion
from mlsm_plugin.fairseq_plugin.data.token_blocks import is_content


@dataclass
class SpanContrastiveConfig(FairseqDataclass):
    """The options of the loss."""

    similarity: ChoiceEnum(SIMILARITIES) = option(  # type: ignore[valid-type]
        "inner", help="score of a query and a key: inner product, or negative squared distance"
    )
    # fairseq understands typing.Optional, but not `float | None`
    similarity_temperature: Optional[float] = option(  # noqa: UP045
        None, help="divisor of the scores (default: square root of the width)"
    )
    closed_set_temperature: float = option(
        1.0, help="further divisor of the scores in zero-shot classification, which training does not use"
    )
    negatives_across_ranks: bool = option(False, help="retrieve from the sequences of all ranks' batches")
    negative_group_size: Optional[int] = option(  # noqa: UP045
        None, help="number of ranks that share their sequences, with --negatives-across-ranks (default: all)"
    )


@register_criterion("span_contrastive", dataclass=SpanContrastiveConfig)
class SpanContrastiveCriterion(SummedCriterion):
    """The loss of a span's start plus the loss of its end, as a mean over the spans.

    ValueError if the task is not ``nonparametric_masked_lm``, a temperature is not positive, or
    ``negative_group_size`` is set without ``negatives_across_ranks``.
    """

    def __init__(self, cfg: SpanContrastiveConfig, task: FairseqTask) -> None:
        super().__init__(task)
        if not hasattr(task.cfg, "span_mode"):
            raise ValueError("--criterion span_contrastive needs --task nonparametric_masked_lm, which masks its spans")
        check_similarity(str(cfg.similarity), cfg.similarity_temperature)
        if not cfg.closed_set_temperature > 0:
            raise ValueError(f"--closed-set-temperature must be positive, got {cfg.closed_set_temperature}")
        if cfg.negative_group_size is not None and not cfg.negatives_across_ranks:
            raise ValueError("--negative-group-size needs --negatives-across-ranks")
        self.cfg = cfg
        self.dictionary = task.source_dictionary
        self.single = str(task.cfg.span_mode) == "single"
        self.masks = sorted({task.mask_idx, *task.span_masks})

    def forward(
        self, model: BaseFairseqModel, sample: Sample, reduce: bool = True
    ) -> tuple[Tensor, Tensor, LoggingOutput]:
        features, key_features, key_tokens = self._encode(model, sample)
        content = is_content(key_tokens, self.dictionary)
        for mask in self.masks:
            content &= key_tokens != mask
        spans = sample["spans"]
        if sample.get("is_dummy"):  # this rank has no batch left
            content = torch.zeros_like(content)
            spans = without_spans(spans)
        keys, tokens, first = self._gathered(key_features, key_tokens.masked_fill(~content, NO_KEY), content)
        terms = span_batch_terms(
            features,
            keys,
            tokens,
            spans,
            span_ngrams(sample["context"]["src_tokens"], spans),
            first=first,
            single=self.single,
            similarity=str(self.cfg.similarity),
            temperature=self.cfg.similarity_temperature,
        )
        loss = sum((term.loss for term in terms.values()), start=zero_with_gradient(lm_head(model).parameters()))
        sample_size = terms["start"].has_positive.sum()
        logging_output = {
            "loss": loss.detach(),
            "sample_size": sample_size,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "num_groups": sample["num_groups"],
            "num_groups_without_spans": sample["num_groups_without_spans"],
            "num_spans": len(spans["length"]),
            "num_masked": spans["length"].sum(),
            **found_spans(terms),
        }
        for name, term in terms.items():
            logging_output[f"{name}_loss"] = term.loss.detach()
        return loss, sample_size, logging_output

    def _encode(self, model: BaseFairseqModel, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden states of the masked sequences, and the hidden states and ids of the sequences with the keys."""
        masked = sample["net_input"]["src_tokens"]
        context = sample["context"]["src_tokens"]
        if sample["mask_context"]:
            features = model(masked, features_only=True)[0]
            return features, features, masked
        sequences = stacked(masked, context, self.padding_idx)
        features, key_features = model(sequences, features_only=True)[0].chunk(2)
        return features, key_features[:, : context.size(1)], context

    def _gathered(self, key_features: Tensor, tokens: Tensor, content: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys ``(m, d)``, ids of all sequences ``(S, T)``, and the index of this rank's first sequence."""
        keys = key_features[content]
        if not self.cfg.negatives_across_ranks:
            return keys, tokens, 0
        group = rank_group(self.cfg.negative_group_size)
        width = int(largest_over_ranks(torch.tensor([tokens.size(1)], device=tokens.device), group))
        tokens, first = gather_rows(torch.nn.functional.pad(tokens, (0, width - tokens.size(1)), value=NO_KEY), group)
        return gather_rows_with_gradient(keys, group)[0], tokens, first

    @staticmethod
    def reduce_metrics(logging_outputs: list[LoggingOutput]) -> None:
        """Log means over the spans of all workers; losses in bits (base 2), as in fairseq."""
        means = LoggedMeans(logging_outputs)
        counted = means.total("sample_size")
        groups = means.total("num_groups")
        means.log("loss", "loss", counted, unit=BIT)
        for end in ("start", "end"):
            if means.has(f"{end}_loss"):
                means.log(f"{end}_loss", f"{end}_loss", counted, unit=BIT)
                means.log(f"{end}_accuracy", f"num_{end}s_found", counted)
        means.log("accuracy", "num_found", counted)
        means.log("with_positive", "sample_size", means.total("num_spans"))
        means.log("spans_per_group", "num_spans", groups)
        means.log("span_length", "num_masked", means.total("num_spans"))
        means.log("groups_without_spans", "num_groups_without_spans", groups)
