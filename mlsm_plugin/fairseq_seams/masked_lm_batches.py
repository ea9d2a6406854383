"""The batches of fairseq's ``masked_lm``, taken apart.

``MaskedLMTask.load_dataset`` leaves a SortDataset around a NestedDictionaryDataset, whose ``defn`` holds a dataset for
each key of a batch; a nested key is ``outer.inner``.
"""

from __future__ import annotations

from typing import Any

from fairseq.data import NumelDataset, RightPadDataset


def masked_targets(batches: Any) -> Any:
    """The targets before they are padded: the id of a masked token, padding elsewhere, ``(T,)`` for each sample.

    Args:
        batches: the dataset of a split, as ``MaskedLMTask.load_dataset`` leaves it.
    """
    return _entries(batches)["target"].dataset


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
