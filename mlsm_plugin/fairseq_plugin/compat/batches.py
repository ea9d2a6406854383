"""Words and random symbols in masks, datasets that keep their last batch, and the batches of an update."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, FairseqDataset, MaskTokensDataset
from fairseq.data.iterators import CountingIterator, EpochBatchIterator

from mlsm_plugin.core.masking.masked_share import samples_to_look_at

Sample = dict[str, Any]  # a batch as fairseq collates it: tensors, numbers and groups of them, by name
LoggingOutput = dict[str, Any]  # the figures of a batch or an update that fairseq logs, by name


class WordBeginnings:
    """Replaces the tensor ``(V,)`` in which ``MaskTokensDataset`` looks up which tokens of a sample begin words.

    Each token of a long word counts as a word: ``in_long_words`` maps whether each token of a sample begins a word,
    bool ``(T,)``, to whether it is in a long word. ``begins_word`` is uint8.
    """

    def __init__(self, begins_word: torch.Tensor, in_long_words: Callable[[np.ndarray], np.ndarray]) -> None:
        self.begins_word = begins_word
        self.in_long_words = in_long_words

    def gather(self, dim: int, tokens: torch.Tensor) -> torch.Tensor:
        begins = self.begins_word.gather(dim, tokens).bool().numpy()
        return torch.from_numpy(begins | self.in_long_words(begins)).byte()


def never_draw(dataset: MaskTokensDataset, symbols: Sequence[int]) -> None:
    """Keep a ``MaskTokensDataset`` from replacing masked tokens by one of these symbols; it draws by ``weights``."""
    if symbols and dataset.random_token_prob > 0:
        weights = dataset.weights.copy()
        weights[list(symbols)] = 0
        dataset.weights = weights / weights.sum()


class WholeEpochsDataset(FairseqDataset):
    """A dataset that keeps its last batch, even if its size is no multiple of ``--required-batch-size-multiple``."""

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[np.ndarray]:
        """fairseq's batches, and a batch of the samples that it drops; ValueError for a sample above ``max_tokens``."""
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


class SortedWholeEpochsDataset(WholeEpochsDataset, BaseWrapperDataset):
    """Samples in batches of similar length, which differ from epoch to epoch; the last batch is kept.

    ``lengths`` ``(n,)`` are the lengths of the samples; samples of the same length are in random order.
    """

    def __init__(self, dataset: FairseqDataset, lengths: np.ndarray) -> None:
        super().__init__(dataset)
        self.lengths = lengths

    def ordered_indices(self) -> np.ndarray:
        """The numbers of the samples in ascending length; fairseq seeds numpy by the epoch before the call."""
        return np.lexsort([np.random.permutation(len(self)), self.lengths])

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return False  # a resumed run must not keep the batches of the first epoch


def batches_to_look_at(iterator: EpochBatchIterator) -> Iterator[Sample]:
    """Collated batches from all parts of an epoch, in random order."""
    batches = iterator.frozen_batches
    for number in samples_to_look_at(len(batches)):
        yield iterator.collate_fn([iterator.dataset[index] for index in batches[number]])


class UpdateLookahead:
    """Records the batches that the trainer fetches from a data iterator.

    fairseq's trainer fetches all ``--update-freq`` batches of an update before it computes the first. The totals of an
    update, which an exact mean needs, are therefore known in time.
    """

    def __init__(self) -> None:
        self._fetched: list[Sample] = []
        self._source: CountingIterator | None = None

    def watch(self, iterator: EpochBatchIterator) -> EpochBatchIterator:
        """Record the batches of ``iterator`` in every following epoch, except those of a validation."""
        if getattr(iterator, "is_watched", False):  # the task kept it from the last epoch
            return iterator
        original = iterator.next_epoch_itr

        def next_epoch_itr(*args: object, **kwargs: object) -> CountingIterator:
            batches = original(*args, **kwargs)
            validation = not kwargs.get("set_dataset_epoch", True)  # fairseq wants the same masks every time
            return batches if validation else _WatchedIterator(batches, self)

        iterator.next_epoch_itr = next_epoch_itr
        iterator.is_watched = True
        return iterator

    def note(self, batch: Sample, source: CountingIterator) -> None:
        """Record that ``batch`` was fetched from ``source``; drop batches of another source that were not taken."""
        if source is not self._source:
            self._fetched.clear()
            self._source = source
        self._fetched.append(batch)

    def take(self) -> list[Sample]:
        """The collated batches fetched since the last call; empty batches may fill the end of an epoch."""
        fetched = list(self._fetched)
        self._fetched.clear()
        return fetched


class _WatchedIterator(CountingIterator):
    """Yields the items of ``iterator`` and reports each to ``lookahead``."""

    total: int

    def __init__(self, iterator: CountingIterator, lookahead: UpdateLookahead) -> None:
        super().__init__(iterator, start=iterator.n, total=iterator.total)
        self._lookahead = lookahead

    def __next__(self) -> Sample:
        batch = super().__next__()
        self._lookahead.note(batch, self)
        return batch

    def take(self, n: int) -> "_WatchedIterator":
        """Stop after ``n`` items, counted from the beginning of the epoch, like the watched iterator."""
        self.total = min(self.total, n)
        self._itr.take(n)
        return self
