"""MLM for masked LMs of Hugging Face, with the head on masked tokens only."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.huggingface.collators import IGNORED
from mlsm_plugin.huggingface.masked_lms import head_of
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel, spread


class MaskedLmModel(PretrainingModel):
    """A masked LM that computes its loss as the stock class does, faster and with exact means over an update."""

    parts: ClassVar[tuple[str, ...]] = ("mlm", "masked")
    means: ClassVar[dict[str, tuple[str, str]]] = {"mlm_loss": ("mlm", "masked")}

    def set_objective(self) -> None:
        """There are no options."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **options: Any,
    ) -> Any:
        """The loss of a batch of :class:`~mlsm_plugin.huggingface.collators.MaskedLmCollator`.

        Args:
            input_ids, attention_mask, labels: ``(B, T)``; without labels, this is the stock forward pass.
            num_items_in_batch: number of masked tokens of the update; None: those of the batch.
            options: of the stock class.
        """
        if labels is None or input_ids is None:
            return super().forward(  # type: ignore[misc]
                input_ids=input_ids, attention_mask=attention_mask, **options
            )
        head, masked = head_of(self), labels != IGNORED
        logits = head.project(head.transform(self._encoded(input_ids, attention_mask, **options)[0][masked]))
        total, num_masked = F.cross_entropy(logits.float(), labels[masked], reduction="sum"), masked.sum()
        loss = self._mean(total, num_masked, num_items_in_batch)
        sums = [total, num_masked]
        return self._result(loss, sums if self.training else spread(sums, len(labels)))
