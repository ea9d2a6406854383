"""Whether a batch has padding, as the loader knows without looking at the ids."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq.data import FairseqDataset


class BatchPaddingDataset(FairseqDataset):
    """Lengths of samples, which collate to a bool: whether any of the batch is shorter than the longest.

    Args:
        sizes: number of tokens of each sample.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __getitem__(self, index: int) -> int:
        return int(self.sizes[index])

    def __len__(self) -> int:
        return len(self.sizes)

    def collater(self, samples: list[int]) -> bool:
        """Whether a batch of samples of these lengths has padding."""
        return len(set(samples)) > 1
