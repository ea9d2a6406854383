"""The loss of a masked LM on a split, with the same masks for every model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import Tensor

from mlsm_plugin.evaluation.masked_batches import masked_batches, shown_chunks
from mlsm_plugin.evaluation.masked_lms import MaskedLm, open_masked_lm
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings


@dataclass(frozen=True)
class MaskedLmLoss:
    """The loss of a masked LM.

    Rarer tokens are all except the most frequent types that make up half of the text. A model can copy a rarer token
    that is visible elsewhere in its block. If it has not learned to copy, its loss is as high as for new tokens.

    Attributes:
        bits: mean cross entropy of the masked tokens, in bits.
        masked_tokens: their number.
        repeated_bits: mean over rarer tokens that are visible elsewhere in their block; None if there are none.
        new_bits: mean over the other rarer tokens; None if there are none.
    """

    bits: float
    masked_tokens: int
    repeated_bits: float | None
    new_bits: float | None


def frequent_types(dictionary: Dictionary) -> Tensor:
    """Mark the most frequent types, which together make up at most half of the counts: ``(len(dictionary),)`` bool."""
    counts = np.asarray(dictionary.count, dtype=np.int64)
    order = np.argsort(-counts, kind="stable")
    frequent = np.zeros(len(counts), bool)
    frequent[order[counts[order].cumsum() <= counts.sum() / 2]] = True
    return torch.from_numpy(frequent)


def masked_lm_loss(model: MaskedLm, reader: BlockReader, *, seed: int = 1, batch_tokens: int = 8192) -> MaskedLmLoss:
    """The loss of a masked LM on all blocks of a split.

    15 % of the content tokens become ``<mask>``, except unknown tokens. The choice only depends on the seed and the
    positions.

    Raises:
        ValueError: no token is masked, or the loss is NaN or infinite.
    """
    frequent = frequent_types(reader.dictionary)
    sums = np.zeros(3)  # of frequent, repeated and new tokens, as are the counts
    counts = np.zeros(3, np.int64)
    chunks = shown_chunks(reader, np.arange(len(reader)), batch_tokens=batch_tokens, what="masked-LM loss")
    for batch in masked_batches(reader, chunks, seed=seed, batch_tokens=batch_tokens):
        losses = model.losses(batch.inputs, batch.masked, batch.targets)
        samples, places = batch.masked.nonzero(as_tuple=True)
        types = batch.targets[samples, places]
        visible = (batch.inputs[samples] == types[:, None]).any(dim=1)
        kinds = torch.where(frequent[types], 0, torch.where(visible, 1, 2)).numpy()
        sums += np.bincount(kinds, losses.double().cpu().numpy(), minlength=3)
        counts += np.bincount(kinds, minlength=3)
    if counts.sum() == 0:
        raise ValueError("no token of the split is masked; it is too short")
    if not np.isfinite(sums).all():
        raise ValueError("the masked-LM loss is not finite")
    means = sums / counts.clip(min=1) / log(2)
    _, repeated, new = (float(mean) if count else None for mean, count in zip(means, counts, strict=True))
    return MaskedLmLoss(float(sums.sum() / counts.sum() / log(2)), int(counts.sum()), repeated, new)


def evaluate_masked_lm(
    checkpoint: str | os.PathLike[str],
    data_bin: str | os.PathLike[str],
    split: str,
    blocks: BlockSettings,
    *,
    seed: int = 1,
    device: str | torch.device | None = None,
    fp16: bool = False,
) -> MaskedLmLoss:
    """The loss of a checkpoint on a split.

    Args:
        checkpoint: of fairseq, or ``hf:`` and a folder.
        data_bin, split: the binarized split.
        blocks: how the text is cut into blocks.
        seed: decides which tokens are masked.
        device: of the model; None for the GPU if there is one.
        fp16: run the model in half precision.

    Raises:
        NoMaskedLmError: its masked-LM head was not trained.
        FileNotFoundError, ValueError: the model cannot be opened, or an error of :func:`masked_lm_loss`.
    """
    model = open_masked_lm(checkpoint, data_bin, device=device, fp16=fp16)
    return masked_lm_loss(model, BlockReader(data_bin, split, blocks), seed=seed)
