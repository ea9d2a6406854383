"""The samples and batches of ``masked_lm``, datasets that keep their last batch, and the batches of an update."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, LRUCacheDataset, NumelDataset, RightPadDataset, SortDataset
from fairseq.data.iterators import CountingIterator, EpochBatchIterator
from fairseq.tasks.masked_lm import MaskedLMTask


class OwnSamplesMaskedLMTask(MaskedLMTask, ABC):
    """``masked_lm`` that masks the samples of :meth:`load_samples`.

    ``MaskedLMTask.load_dataset`` gets the samples from its private method ``_load_dataset_split``, in fairseq 0.12.2
    and in fairseq-fixed 0.12.3. Only this method is replaced. For ``--mask-whole-words`` it reads its attribute
    ``args``, which it does not set.
    """

    @abstractmethod
    def tokenizer_options(self) -> dict[str, Any]:
        """The options with which fairseq opens the tokenizer of the data, by name."""

    @property
    def args(self) -> argparse.Namespace:
        """What ``--mask-whole-words`` reads."""
        return argparse.Namespace(**self.tokenizer_options())

    @abstractmethod
    def load_samples(self, split: str, epoch: int, combine: bool) -> Any:
        """The samples of a split before masking, each beginning with BOS: a dataset of ids ``(T,)``."""

    def _load_dataset_split(self, split: str, epoch: int, combine: bool) -> Any:
        return self.load_samples(split, epoch, combine)


def masked_targets(batches: Any) -> Any:
    """The targets before they are padded: the id of a masked token, padding elsewhere, ``(T,)`` for each sample.

    Args:
        batches: the dataset of a split, as ``MaskedLMTask.load_dataset`` leaves it.
    """
    return _entries(batches)["target"].dataset


def masked_inputs(batches: Any) -> Any:
    """The inputs before they are padded, ``(T,)`` for each sample.

    Args:
        batches: the dataset of a split, as ``MaskedLMTask.load_dataset`` leaves it.
    """
    return _entries(batches)["net_input.src_tokens"].dataset


def cut_long_words(batches: Any, in_long_words: Callable[[np.ndarray], np.ndarray]) -> None:
    """Let ``--mask-whole-words`` take the tokens of long words for words.

    Args:
        batches: the dataset of a split, as ``MaskedLMTask.load_dataset`` leaves it.
        in_long_words: from which tokens of a sample begin words, bool ``(T,)``, to which are in long words.
    """
    for cached in (masked_inputs(batches), masked_targets(batches)):
        masking = cached.dataset
        if masking.mask_whole_words is not None:
            masking.mask_whole_words = _WordBeginnings(masking.mask_whole_words, in_long_words)


class _WordBeginnings:
    """Takes the place of the tensor ``(V,)`` that fairseq asks, by ``gather``, which tokens of a sample begin words."""

    def __init__(self, begins_word: torch.Tensor, in_long_words: Callable[[np.ndarray], np.ndarray]) -> None:
        self.begins_word, self.in_long_words = begins_word, in_long_words

    def gather(self, dim: int, tokens: torch.Tensor) -> torch.Tensor:
        begins = self.begins_word.gather(dim, tokens).bool().numpy()
        return torch.from_numpy(begins | self.in_long_words(begins)).byte()


def replace_masks(batches: Any, inputs: Any, targets: Any, *, pad: int) -> None:
    """Put other inputs and targets in the place of fairseq's.

    Args:
        batches: the dataset of a split, as ``MaskedLMTask.load_dataset`` leaves it.
        inputs, targets: ids of each sample, ``(T,)``.
        pad: the padding id.
    """
    entries = _entries(batches)
    entries["net_input.src_tokens"] = RightPadDataset(inputs, pad_idx=pad)
    entries["net_input.src_lengths"] = NumelDataset(inputs, reduce=False)
    entries["ntokens"] = NumelDataset(inputs, reduce=True)
    entries["target"] = RightPadDataset(targets, pad_idx=pad)
    if "net_input.target_tokens" in entries:  # --include-target-tokens
        entries["net_input.target_tokens"] = entries["target"]


def add_to_batches(batches: Any, key: str, dataset: Any) -> None:
    """Let each batch also hold what ``dataset`` collates, as ``key``."""
    _entries(batches)[key] = dataset


def tell_model(batches: Any, name: str, dataset: Any) -> None:
    """Hand what ``dataset`` collates to the model, as its argument ``name``."""
    _entries(batches)[f"net_input.{name}"] = dataset


def _entries(batches: Any) -> dict[str, Any]:
    entries: dict[str, Any] = batches.dataset.defn
    return entries


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


class UpdateLookahead:
    """Records the batches that the trainer fetches from a data iterator.

    fairseq's trainer fetches all ``--update-freq`` batches of an update before it computes the first. The batches
    fetched since the last update therefore are this update, and its totals, which an exact mean needs, are known in
    time.
    """

    def __init__(self) -> None:
        self._fetched: list[Any] = []
        self._source: CountingIterator | None = None

    def watch(self, iterator: EpochBatchIterator) -> EpochBatchIterator:
        """Record the batches of ``iterator`` in every following epoch, except those of a validation."""
        if getattr(iterator, "is_watched", False):  # the task kept it from the last epoch
            return iterator
        original = iterator.next_epoch_itr

        def next_epoch_itr(*args: Any, **kwargs: Any) -> CountingIterator:
            batches = original(*args, **kwargs)
            validation = not kwargs.get("set_dataset_epoch", True)  # here fairseq asks for the same masks every time
            return batches if validation else _WatchedIterator(batches, self)

        iterator.next_epoch_itr = next_epoch_itr
        iterator.is_watched = True
        return iterator

    def note(self, batch: Any, source: CountingIterator) -> None:
        """Record that ``batch`` was fetched from ``source``; forget batches of another source that were not taken."""
        if source is not self._source:
            self._fetched.clear()
            self._source = source
        self._fetched.append(batch)

    def take(self) -> list[Any]:
        """The batches fetched since the last call, as collated; empty batches may fill the end of an epoch."""
        fetched = list(self._fetched)
        self._fetched.clear()
        return fetched


class _WatchedIterator(CountingIterator):
    """Yields the items of ``iterator`` and reports each to ``lookahead``."""

    total: int

    def __init__(self, iterator: CountingIterator, lookahead: UpdateLookahead) -> None:
        super().__init__(iterator, start=iterator.n, total=iterator.total)
        self._lookahead = lookahead

    def __next__(self) -> Any:
        batch = super().__next__()
        self._lookahead.note(batch, self)
        return batch

    def take(self, n: int) -> _WatchedIterator:
        """Stop after ``n`` items, counted from the beginning of the epoch as the watched iterator does."""
        self.total = min(self.total, n)
        self._itr.take(n)
        return self
