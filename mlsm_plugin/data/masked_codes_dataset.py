"""The sparse codes of the masked tokens of a batch."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.data import BaseWrapperDataset

from mlsm_plugin.sparse_coding.code_store import CodeStore


class MaskedCodesDataset(BaseWrapperDataset):
    """Looks up, by position, the codes of the tokens that a masked-LM target asks for.

    Only the rows of masked tokens are read. The rows of a batch stand in the order in which
    ``target.ne(pad)`` picks the masked tokens from the right-padded batch.

    Args:
        positions: flat positions of the tokens of each sample, ``NO_POSITION`` where there is none.
        targets: masked-LM targets of the same samples, ``pad`` where a token is not masked.
        store: the codes of the split.
        pad: the padding id.
    """

    def __init__(self, positions: Any, targets: Any, store: CodeStore, pad: int) -> None:
        super().__init__(positions)
        self.targets = targets
        self.store = store
        self.pad = pad

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.dataset[index][self.targets[index] != self.pad]

    def collater(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """``atoms`` (n_masked, m) int32 padded with -1, ``weights`` (n_masked, m) float16 padded with 0.

        float16 is how the store keeps them, and a dtype that fairseq's fp16 and bf16 modes leave alone.
        """
        atoms, weights = self.store.lookup(torch.cat(samples).numpy())
        return {"atoms": torch.from_numpy(atoms), "weights": torch.from_numpy(weights)}

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.targets.set_epoch(epoch)
