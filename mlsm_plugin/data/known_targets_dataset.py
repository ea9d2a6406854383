"""Masked-LM inputs and targets in which no unknown token is masked."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.data import BaseWrapperDataset, Dictionary


class KnownTargetsDataset(BaseWrapperDataset):
    """Inputs or targets with the masks of unknown tokens taken back; all other masks stay. Use :meth:`of`.

    Args:
        values: dataset of the inputs or targets of each sample ``(T,)``.
        targets: dataset of the targets ``(T,)``: the id of a masked token, padding elsewhere.
        unknown: id of unknown tokens.
        instead: what ``values`` get in the places of masked unknown tokens.
    """

    def __init__(self, values: Any, targets: Any, *, unknown: int, instead: int) -> None:
        super().__init__(values)
        self.targets, self.unknown, self.instead = targets, unknown, instead

    @classmethod
    def of(cls, inputs: Any, targets: Any, vocab: Dictionary) -> tuple[KnownTargetsDataset, KnownTargetsDataset]:
        """The dataset of inputs and that of targets."""
        unknown = vocab.unk()
        return (
            cls(inputs, targets, unknown=unknown, instead=unknown),
            cls(targets, targets, unknown=unknown, instead=vocab.pad()),
        )

    def __getitem__(self, index: int) -> torch.Tensor:
        values: torch.Tensor = self.dataset[index]
        return values.masked_fill(self.targets[index] == self.unknown, self.instead)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.targets.set_epoch(epoch)
