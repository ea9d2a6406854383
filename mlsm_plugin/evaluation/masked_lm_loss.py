"""The loss of a masked LM on a split, with the same masks for every model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mlsm_plugin.data.token_blocks import is_content
from mlsm_plugin.hidden_states.block_reader import Block, BlockReader, BlockSettings, batches_of
from mlsm_plugin.hidden_states.masked_lms import MaskedLm, open_masked_lm
from mlsm_plugin.sparse_coding.coverage import covered_positions

MASKED_SHARE = 0.15  # of the content tokens, as in BERT; all of them become <mask>


class MaskedBatch(NamedTuple):
    """A batch of blocks, right-padded; all parts are ``(B, T)``."""

    inputs: Tensor
    """ids, masks included"""
    masked: Tensor
    """which tokens are predicted"""
    targets: Tensor
    """ids without masks"""
    content: Tensor
    """which tokens are not BOS, EOS or padding"""


def masked_batches(
    reader: BlockReader, chunks: Iterable[list[Block]], *, seed: int, batch_tokens: int
) -> Iterator[MaskedBatch]:
    """Blocks with masks, which depend on the seed and the positions of the tokens; batches without any are left out.

    Args:
        reader: of the split.
        chunks: lists of its blocks.
        seed: decides which tokens are masked.
        batch_tokens: tokens in a batch, padding included.
    """
    mask, pad = reader.dictionary.index("<mask>"), reader.dictionary.pad()
    for blocks in chunks:
        for tokens, positions in batches_of(blocks, pad=pad, max_tokens=batch_tokens):
            content = is_content(tokens, reader.dictionary)
            drawn = covered_positions(positions.numpy(), coverage=MASKED_SHARE, seed=seed)
            masked = content & torch.from_numpy(drawn)
            if masked.any():
                inputs = torch.where(masked, torch.full_like(tokens, mask), tokens)
                yield MaskedBatch(inputs, masked, tokens, content)


def chunks_of(reader: BlockReader, numbers: np.ndarray, *, batch_tokens: int, what: str) -> Iterator[list[Block]]:
    """Blocks, about ``batch_tokens`` tokens of text at a time, with a progress bar.

    Args:
        reader: of the split.
        numbers: of the blocks, ascending.
        batch_tokens: tokens in a chunk.
        what: name of the bar.
    """
    chunk: list[Block] = []
    size = 0
    with tqdm(total=int(reader.sizes[numbers].sum()), desc=what, unit="token", unit_scale=True) as progress:
        for number in numbers:
            if chunk and size + int(reader.sizes[number]) > batch_tokens:
                yield chunk
                progress.update(size)
                chunk, size = [], 0
            chunk += reader.block(int(number))
            size += int(reader.sizes[number])
        yield chunk
        progress.update(size)


@dataclass(frozen=True)
class MaskedLmLoss:
    """The loss of a masked LM.

    Attributes:
        bits: mean cross entropy of the masked tokens, in bits.
        masked_tokens: how many.
    """

    bits: float
    masked_tokens: int


def masked_lm_loss(model: MaskedLm, reader: BlockReader, *, seed: int = 1, batch_tokens: int = 8192) -> MaskedLmLoss:
    """The loss of a masked LM on all blocks of a split.

    15 % of the content tokens become ``<mask>``; which ones, depends on the seed and their positions only.

    Raises:
        ValueError: no token is masked, or the loss is NaN or infinite.
    """
    total, count = 0.0, 0
    chunks = chunks_of(reader, np.arange(len(reader)), batch_tokens=batch_tokens, what="masked-LM loss")
    for batch in masked_batches(reader, chunks, seed=seed, batch_tokens=batch_tokens):
        losses = model.losses(batch.inputs, batch.masked, batch.targets)
        total, count = total + float(losses.sum()), count + len(losses)
    if count == 0:
        raise ValueError("no token of the split is masked; it is too short")
    if not np.isfinite(total):
        raise ValueError("the masked-LM loss is not finite")
    return MaskedLmLoss(total / count / log(2), count)


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
        blocks: what the model sees at once.
        seed: decides which tokens are masked.
        device: of the model; None for the GPU if there is one.
        fp16: run the model in half precision.

    Raises:
        NoMaskedLmError: its masked-LM head was not trained.
        FileNotFoundError, ValueError: the model cannot be opened, or as of :func:`masked_lm_loss`.
    """
    model = open_masked_lm(checkpoint, data_bin, device=device, fp16=fp16)
    return masked_lm_loss(model, BlockReader(data_bin, split, blocks), seed=seed)
