"""The batches of NPM: groups of sequences whose common spans are masked (Min et al., 2022)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlsm_plugin.data.span_groups import SpanMasking, collate_groups, consecutive_groups, draw_spans
from mlsm_plugin.fairseq_seams.whole_epochs import WholeEpochsDataset

__all__ = ["SpanGroupsDataset", "SpanMasking", "consecutive_groups"]


class SpanGroupsDataset(WholeEpochsDataset):
    """Groups of blocks; an item is a group with its masked spans, drawn anew in every epoch.

    Args:
        blocks: dataset of the ids of each block; ``blocks.sizes`` has their lengths.
        groups: numbers of the blocks of each group.
        masking: how spans are drawn and written.
        shuffle: draw the order of the groups anew in every epoch.
    """

    def __init__(self, blocks: Any, groups: list[np.ndarray], masking: SpanMasking, *, shuffle: bool) -> None:
        self.blocks = blocks
        self.groups = groups
        self.masking = masking
        self.shuffle = shuffle
        self.epoch = 1
        sizes = np.asarray(blocks.sizes)
        self.sizes = np.array([int(sizes[group].sum()) for group in groups])
        self._longest = np.array([int(sizes[group].max()) for group in groups])

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sequences = [self.blocks[int(block)].numpy() for block in self.groups[index]]
        return draw_spans(sequences, self.masking, epoch=self.epoch, index=index)

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of groups, see :func:`collate_groups`."""
        return collate_groups(samples, self.masking) if samples else {}

    def num_tokens(self, index: int) -> int:
        """The number of tokens of a group."""
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of tokens of several groups: ``(n,)``."""
        return self.sizes[indices]

    def size(self, index: int) -> int:
        """The length of the longest sequence of a group, which the model's positions limit."""
        return int(self._longest[index])

    def ordered_indices(self) -> np.ndarray:
        """All indices, in random order (fairseq seeds numpy before the call) or in the given order."""
        return np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: Any) -> tuple[np.ndarray, list[int]]:
        """Indices of the groups whose sequences all have at most ``max_sizes`` tokens, and the other indices."""
        limit = max_sizes if isinstance(max_sizes, (int, float)) else min(max_sizes)
        fits = self._longest[indices] <= limit
        return indices[fits], indices[~fits].tolist()

    @property
    def supports_prefetch(self) -> bool:
        return False

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return False  # fairseq seeds the order by the epoch, so a resumed run must not keep that of the first

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the spans."""
        super().set_epoch(epoch)
        self.epoch = epoch
