"""The batches of fairseq's ``masked_lm``, taken apart.

``MaskedLMTask.load_dataset`` leaves a SortDataset around a NestedDictionaryDataset, whose ``defn`` holds a dataset for
each key of a batch; a nested key is ``outer.inner``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fairseq.data import NumelDataset, RightPadDataset


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
