"""Masked batches of a split, the same for every model."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.hidden_states.blocks import chunks_of
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions
from mlsm_plugin.fairseq_plugin.coding.block_reader import Block, BlockReader, batches_of
from mlsm_plugin.fairseq_plugin.data.token_blocks import is_content, is_known

MASKED_SHARE = 0.15  # of the content tokens, as in BERT; all of them become <mask>


class MaskedBatch(NamedTuple):
    """A batch of blocks, right-padded; all parts are ``(B, T)``."""

    inputs: Tensor  # ids, masks included
    masked: Tensor  # which tokens are predicted
    targets: Tensor  # ids without masks
    content: Tensor  # which tokens are not BOS, EOS or padding


def masked_batches(
    reader: BlockReader, chunks: Iterable[list[Block]], *, seed: int, batch_tokens: int
) -> Iterator[MaskedBatch]:
    """Masked batches of blocks; the masks depend on the seed and the positions. Batches without masks are left out.

    ``chunks`` are lists of blocks of the split; a batch has at most ``batch_tokens`` tokens, including padding.
    """
    mask = reader.dictionary.index("<mask>")
    pad = reader.dictionary.pad()
    for blocks in chunks:
        for tokens, positions in batches_of(blocks, pad=pad, max_tokens=batch_tokens):
            content = is_content(tokens, reader.dictionary)
            drawn = covered_positions(positions.numpy(), coverage=MASKED_SHARE, seed=seed)
            masked = is_known(tokens, reader.dictionary) & torch.from_numpy(drawn)
            if masked.any():
                inputs = torch.where(masked, torch.full_like(tokens, mask), tokens)
                yield MaskedBatch(inputs, masked, tokens, content)


def shown_chunks(reader: BlockReader, numbers: np.ndarray, *, batch_tokens: int, what: str) -> Iterator[list[Block]]:
    """The blocks with these numbers, about ``batch_tokens`` tokens at a time, with a progress bar named ``what``."""
    pieces = (piece for number in numbers for piece in reader.block(int(number)))
    with Progress(total=int(reader.sizes[numbers].sum()), desc=what, unit="token", unit_scale=True) as progress:
        for chunk in chunks_of(pieces, batch_tokens):
            yield chunk
            progress.update(sum(int((piece.positions >= 0).sum()) for piece in chunk))
