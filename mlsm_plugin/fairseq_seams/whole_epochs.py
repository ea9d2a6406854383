"""Datasets whose batches hold every sample of an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
from fairseq.data import FairseqDataset, LRUCacheDataset, SortDataset


class WholeEpochsDataset(FairseqDataset):
    """A dataset whose last batch is kept, whatever its size.

    fairseq-fixed leaves the last batch out if its size is not a multiple of ``--required-batch-size-multiple``. A
    dataset of fewer than eight samples would not have a single batch.
    """

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[Any]:
        """The batches of :meth:`FairseqDataset.batch_by_size`, and a last one of the samples that those leave out.

        Raises:
            ValueError: a sample has more than ``max_tokens`` tokens.
        """
        try:
            batches = list(super().batch_by_size(indices, max_tokens, max_sentences, required_batch_size_multiple))
        except AssertionError as error:
            longest = max(int(self.num_tokens(index)) for index in indices)
            raise ValueError(
                f"--max-tokens {max_tokens} is too few for a batch: the longest sample, or group of samples, has "
                f"{longest} tokens; pass at least that, or --batch-size"
            ) from error
        rest = indices[sum(map(len, batches)) :]
        return [*batches, rest] if len(rest) else batches


class SortedWholeEpochsDataset(WholeEpochsDataset, SortDataset):
    """A :class:`SortDataset` whose batches hold every sample, with the masks of their epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the last samples of another one, which fairseq keeps by their index alone, are forgotten."""
        super().set_epoch(epoch)
        LRUCacheDataset.__getitem__.cache_clear()


def with_whole_epochs(batches: SortDataset) -> SortedWholeEpochsDataset:
    """The same samples in the same order, with a last batch of what fairseq would leave out.

    Args:
        batches: the dataset of a split, as ``MaskedLMTask.load_dataset`` leaves it.
    """
    return SortedWholeEpochsDataset(batches.dataset, batches.sort_order)
