"""TACO for masked LMs of Hugging Face (Fu et al., ACL 2022)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.huggingface.collators import IGNORED
from mlsm_plugin.huggingface.masked_lms import head_of
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel, sums_of_rows
from mlsm_plugin.losses.token_contrastive import check_contrast_weight, contrastive_terms, usable_anchors


class TokenContrastiveModel(PretrainingModel):
    """A masked LM whose nearby tokens get similar global semantics: TACO (Fu et al., ACL 2022), with MLM.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        contrastive_weight: weight of the contrastive loss, not negative.
        temperature: divisor of the cosines, positive.
    """

    parts: ClassVar[tuple[str, ...]] = ("mlm", "masked", "contrastive", "correct", "anchors", "content")
    means: ClassVar[dict[str, tuple[str, str]]] = {
        "mlm_loss": ("mlm", "masked"),
        "contrastive_loss": ("contrastive", "anchors"),
        "contrastive_accuracy": ("correct", "anchors"),
        "masked_share": ("masked", "content"),
    }

    def set_objective(self, *, contrastive_weight: float = 1.0, temperature: float = 0.07) -> None:
        """Set the options of the class; raises ValueError if one is out of range."""
        check_contrast_weight(contrastive_weight, temperature)
        self.contrastive_weight, self.temperature = contrastive_weight, temperature

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pairs: dict[str, Tensor] | None = None,
        content: Tensor | None = None,
        num_items_in_batch: Any = None,
        **options: Any,
    ) -> Any:
        """The loss of a batch of :class:`~mlsm_plugin.huggingface.collators.TokenContrastiveCollator`.

        The global semantics of a token is the difference of its last hidden state and its embedding. The contrastive
        loss of a batch is a mean over its anchors. Over several batches of an update, these means are weighted by the
        masked tokens of the batches.

        Args:
            input_ids, attention_mask, labels: ``(B, T)``; without labels, this is the stock forward pass.
            pairs: anchors, positives and negatives.
            content: ``(B,)`` number of tokens of each sequence but special ones, for ``masked_share``; or None.
            num_items_in_batch: number of masked tokens of the update; None: those of the batch.
            options: of the stock class.
        """
        if labels is None or pairs is None or input_ids is None:
            return super().forward(  # type: ignore[misc]
                input_ids=input_ids, attention_mask=attention_mask, **options
            )
        head, masked = head_of(self), labels != IGNORED
        encoded = self._encoded(input_ids, attention_mask, output_hidden_states=True, **options)
        logits = head.project(head.transform(encoded[0][masked]))
        losses = F.cross_entropy(logits.float(), labels[masked], reduction="none")
        mlm = losses.sum()
        semantics = encoded[0] - encoded.hidden_states[0]
        anchors = usable_anchors(**pairs)

        def terms_of(anchors: Tensor) -> Any:
            return contrastive_terms(
                semantics if self.contrastive_weight > 0 else semantics.detach(),
                *(anchors, pairs["positive"], pairs["negative"]),
                temperature=self.temperature,
            )

        terms = terms_of(anchors)
        num_masked, num_anchors = masked.sum(), anchors.sum()
        weight = self.contrastive_weight * num_masked.clamp(min=1) / num_anchors.clamp(min=1)
        loss = mlm + weight * terms.loss if self.contrastive_weight > 0 else mlm
        loss = self._mean(loss, num_masked, num_items_in_batch)
        num_content = self._num_content(content, labels)
        if self.training:
            sums = [mlm, num_masked, terms.loss, terms.num_correct, num_anchors, num_content.sum()]
            return self._result(loss, sums)
        rows = torch.eye(len(labels), dtype=torch.bool, device=labels.device)[:, :, None]
        of_rows = [terms_of(anchors & row) for row in rows]
        sums = [sums_of_rows(losses, masked), masked.sum(dim=1)]
        sums += [torch.stack([one.loss for one in of_rows]), torch.stack([one.num_correct for one in of_rows])]
        sums += [anchors.sum(dim=1), num_content]
        return self._result(loss, torch.stack([part.detach().double() for part in sums], dim=1))
