"""The sparse codes of the masked tokens of a batch."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.data import BaseWrapperDataset

from mlsm_plugin.sparse_coding.code_store import CodeStore
from mlsm_plugin.sparse_coding.stored_codes import strongest_of_padded


class MaskedCodesDataset(BaseWrapperDataset):
    """Looks up the codes of the masked tokens by their positions.

    Only the rows of masked tokens are read. The rows of a batch are in the order in which ``target.ne(pad)`` selects
    the masked tokens from the right-padded batch.

    Args:
        positions: dataset of the flat positions of each sample's tokens ``(T,)``; ``NO_POSITION`` for a token that is
            not in the split.
        targets: dataset of the masked-LM targets of the same samples ``(T,)``; ``pad`` for tokens that are not masked.
        store: the codes of the split.
        pad: the padding id.
        top: how many atoms of a code are kept, those with the largest weights; None: all.
    """

    def __init__(self, positions: Any, targets: Any, store: CodeStore, pad: int, top: int | None = None) -> None:
        super().__init__(positions)
        self.targets = targets
        self.store = store
        self.pad = pad
        self.top = top

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.dataset[index][self.targets[index] != self.pad]

    def collater(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The codes of a batch.

        Returns:
            ``atoms`` (n_masked, m) int32, padded with -1; ``weights`` (n_masked, m) float16, padded with 0. The store
            has float16 too, and fairseq's fp16 and bf16 modes do not convert it.
        """
        atoms, weights = self.store.lookup(torch.cat(samples).numpy())
        if self.top is not None:
            atoms, weights = strongest_of_padded(atoms, weights, self.top)
        return {"atoms": torch.from_numpy(atoms), "weights": torch.from_numpy(weights)}

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.targets.set_epoch(epoch)
