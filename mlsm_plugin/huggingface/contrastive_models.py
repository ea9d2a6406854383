"""TACO (Fu et al., ACL 2022) and NPM (Min et al., 2022) for models of Hugging Face."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mlsm_plugin.huggingface.collators import IGNORED
from mlsm_plugin.huggingface.pretraining_model import Objective, PretrainingModel, sums_of_rows
from mlsm_plugin.losses.span_contrastive import NO_KEY, check_similarity, span_batch_terms, span_ngrams, stacked
from mlsm_plugin.losses.token_contrastive import check_contrast_weight, contrastive_terms, usable_anchors
from mlsm_plugin.losses.zero_gradients import zero_with_gradient


class TokenContrastiveModel(PretrainingModel):
    """A masked LM whose nearby tokens get similar global semantics: TACO (Fu et al., ACL 2022), with MLM.

    The global semantics of a token is the difference of its last hidden state and its embedding. The contrastive loss
    of a batch is a mean over its anchors. Over several batches of an update, these means are weighted by the masked
    tokens of the batches.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        contrastive_weight: weight of the contrastive loss, not negative.
        temperature: divisor of the cosines, positive.
    """

    figures: ClassVar[tuple[str, ...]] = ("mlm_loss", "contrastive_loss", "contrastive_accuracy", "masked_share")

    def set_objective(self, *, contrastive_weight: float = 1.0, temperature: float = 0.07) -> None:
        """Set the options of the class; raises ValueError if one is out of range."""
        check_contrast_weight(contrastive_weight, temperature)
        self.contrastive_weight, self.temperature = contrastive_weight, temperature

    def _objective(self, labels: Tensor, *, pairs: dict[str, Tensor] | None = None, **inputs: Any) -> Objective:
        if pairs is None:
            raise ValueError("the batch has no pairs; make it with TokenContrastiveCollator")
        encoded = self._encoded(output_hidden_states=True, **inputs)
        loss, (sums, masked) = self._masked_lm(encoded[0], labels)
        semantics = encoded[0] - encoded.hidden_states[0]
        terms = contrastive_terms(
            semantics if self.contrastive_weight > 0 else semantics.detach(), **pairs, temperature=self.temperature
        )
        number, usable = masked.sum(), usable_anchors(**pairs)
        if self.contrastive_weight > 0:
            loss = loss + self.contrastive_weight * number.clamp(min=1) / usable.sum().clamp(min=1) * terms.loss
        anchors = usable.sum(dim=1)
        contrast = [sums_of_rows(terms.losses, usable), anchors, sums_of_rows(terms.correct, usable), anchors]
        return loss, number, [sums, masked, *contrast, masked]


class SpanContrastiveModel(PretrainingModel):
    """An encoder that retrieves the ends of masked spans: NPM (Min et al., 2022), without an output vocabulary.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        similarity: ``inner`` or ``l2``.
        temperature: divisor of the scores, positive; None: the square root of the width.
    """

    figures: ClassVar[tuple[str, ...]] = ("start_loss", "end_loss", "accuracy", "masked_share")

    def set_objective(self, *, similarity: str = "inner", temperature: float | None = None) -> None:
        """Set the options of the class; raises ValueError if one is out of range."""
        check_similarity(similarity, temperature)
        self.similarity, self.temperature = similarity, temperature

    def _objective(
        self,
        labels: Tensor,
        *,
        context_ids: Tensor | None = None,
        spans: dict[str, Tensor] | None = None,
        special: Tensor | None = None,
        **inputs: Any,
    ) -> Objective:
        if context_ids is None or spans is None or special is None:
            raise ValueError("the batch has no spans; make it with SpanGroupsCollator")
        pad = int(special[0])
        both = stacked(inputs["input_ids"], context_ids, pad)
        inputs |= {"input_ids": both, "attention_mask": (both != pad).long()}
        features, key_features = self._encoded(**inputs)[0].chunk(2)
        is_key = ~torch.isin(context_ids, special)
        terms = span_batch_terms(
            *(features, key_features[:, : context_ids.size(1)][is_key], context_ids.masked_fill(~is_key, NO_KEY)),
            *(spans, span_ngrams(context_ids, spans)),
            similarity=self.similarity,
            temperature=self.temperature,
        )
        start, end = terms["start"], terms["end"]
        prefix = f"{self.base_model_prefix}."  # type: ignore[attr-defined]
        named = self.named_parameters()  # type: ignore[attr-defined]
        idle = [parameter for name, parameter in named if not name.startswith(prefix)]
        loss = start.loss + end.loss + zero_with_gradient(idle).to(features.device)
        counted, of_group = start.counted, labels != IGNORED
        of_spans = (start.losses, counted, end.losses, counted, start.found & end.found, counted, spans["length"])
        return loss, counted.sum(), [sums_of_rows(values, of_group) for values in of_spans]
