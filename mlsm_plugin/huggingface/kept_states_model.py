"""Masked LM that keeps the hidden states that a model had before, for Hugging Face models."""

import copy
import hashlib
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.huggingface.collators import IGNORED
from mlsm_plugin.huggingface.pretraining_model import MaskedLmModel, Objective, sums_of_rows

KEEP_WEIGHT = 3.0
SHARE = 4  # one of so many sequences is also read by the model as it was
TINY = 1e-12


class KeptStatesModel(MaskedLmModel):
    """A masked LM whose last hidden states of unmasked tokens stay close to those before the training.

    Vectors of texts, which are means of hidden states, then change little while the model learns the text (Jung et al.,
    2016, *Less-forgetting learning*, arXiv 1607.00122). The model as it was reads a quarter of the sequences of each
    batch, at least one, without masks and dropout.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        keep_weight: weight of ``state_change``, the mean squared change of a hidden state divided by its squared
            length; positive and finite. The masked-LM loss, in nats per masked token, has weight 1. In training, the
            dropout of hidden states is part of the change.
    """

    added_parts: ClassVar[tuple[str, ...]] = ("_before",)
    figures: ClassVar[tuple[str, ...]] = ("mlm_loss", "state_change", "masked_share")

    def set_objective(self, *, keep_weight: float = KEEP_WEIGHT) -> None:
        """Set the options of the class, and copy the encoder as it is; ValueError if the weight is out of range."""
        if not 0 < keep_weight < math.inf:
            raise ValueError(f"keep_weight must be positive and finite, got {keep_weight}")
        self.keep_weight = keep_weight
        # in a tuple, it is not a submodule, so it is neither trained nor saved
        self._before = (copy.deepcopy(self.base_model).eval().requires_grad_(False),)

    def targets_record(self) -> dict[str, object]:
        """The weight of the loss, and SHA-256 of the weights before the training."""
        (before,) = self._before
        digest = hashlib.sha256()
        for weights in before.state_dict().values():
            digest.update(weights.cpu().flatten().view(torch.uint8).numpy())
        return {
            "model whose hidden states are kept": digest.hexdigest()[:12],
            "weight of kept hidden states": self.keep_weight,
        }

    def _objective(self, labels: Tensor, **inputs: Tensor) -> Objective:
        hidden = self._encoded(**inputs)[0]
        loss, (sums, masked) = self._masked_lm(hidden, labels)
        rows = -(-len(labels) // SHARE)
        is_masked = labels[:rows] != IGNORED
        attention_mask = inputs["attention_mask"][:rows]
        kept = (attention_mask > 0) & ~is_masked
        ids = torch.where(is_masked, labels[:rows], inputs["input_ids"][:rows])
        expected = self._states_before(ids, attention_mask)[kept].float()
        change = (hidden[:rows][kept].float() - expected).square().sum(dim=1)
        change = change / expected.square().sum(dim=1).clamp(min=TINY)
        number = masked.sum()
        loss = loss + self.keep_weight * number * change.sum() / kept.sum().clamp(min=1)
        unread = len(labels) - rows
        changes = F.pad(sums_of_rows(change, kept), (0, unread))
        return loss, number, [sums, masked, changes, F.pad(kept.sum(dim=1), (0, unread)), masked]

    @torch.no_grad()
    def _states_before(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The last hidden states ``(B, T, d)`` of the model as it was."""
        (before,) = self._before
        if before.device != ids.device:
            before.to(ids.device)
        hidden: Tensor = before(input_ids=ids, attention_mask=attention_mask, return_dict=True)[0]
        return hidden
