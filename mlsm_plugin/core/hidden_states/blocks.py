"""A text as a model reads it, in any format: blocks in order, with the positions of their tokens."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.core.sparse_coding.stored_codes import NO_POSITION


@dataclass(frozen=True)
class Block:
    """Tokens ``(T,)`` with BOS, and their flat positions ``(T,)`` in the text (-1 for a BOS that is not in it)."""

    tokens: Tensor
    positions: Tensor


class TokenBlocks(Protocol):
    """A text that is cut into blocks."""

    pad: int
    num_tokens: int  # number of tokens in the text, special ones included, and of rows in its code store
    starts: np.ndarray  # (n_blocks,), flat position of each block's first token, strictly ascending
    sizes: np.ndarray  # (n_blocks,), number of tokens of each block that have a position

    def __len__(self) -> int:
        """The number of blocks."""

    def block(self, index: int) -> list[Block]:
        """Block ``index``, in several pieces if it is longer than the model's samples."""

    def content_mask(self, tokens: Tensor) -> Tensor:
        """Which of ``tokens`` (any shape) are neither special nor padding (bool); only those are coded."""


def chunks_of(blocks: Iterable[Block], max_tokens: int, *, with_bos: bool = False) -> Iterator[list[Block]]:
    """Blocks in order, about ``max_tokens`` at a time; ``with_bos`` also counts a BOS that is not in the text."""
    chunk: list[Block] = []
    size = 0
    for block in blocks:
        length = len(block.tokens) if with_bos else int((block.positions >= 0).sum())
        if chunk and size + length > max_tokens:
            yield chunk
            chunk = []
            size = 0
        chunk.append(block)
        size += length
    if chunk:
        yield chunk


def batches_of(blocks: list[Block], *, pad: int, max_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Right-padded batches of blocks of similar length: tokens ``(B, T)`` and positions ``(B, T)`` (padding: -1).

    The order, and with it every bit of the result, depends on ``blocks`` and ``max_tokens`` only.
    """
    order = sorted(range(len(blocks)), key=lambda i: -len(blocks[i].tokens))
    while order:
        longest = len(blocks[order[0]].tokens)
        count = max(1, max_tokens // longest)
        chosen = [blocks[i] for i in order[:count]]
        order = order[count:]
        tokens = torch.full((len(chosen), longest), pad)
        positions = torch.full((len(chosen), longest), NO_POSITION)
        for row, block in enumerate(chosen):
            tokens[row, : len(block.tokens)] = block.tokens
            positions[row, : len(block.tokens)] = block.positions
        yield tokens, positions


def hidden_states_of(
    blocks: list[Block],
    reader: TokenBlocks,
    encoder: HiddenStateEncoder,
    *,
    max_tokens: int,
    keep: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[np.ndarray, Tensor]:
    """Hidden states of the content tokens of ``blocks``, in corpus order, ``max_tokens`` in one forward pass.

    Tokens without a hidden state (zero, see :meth:`HiddenStateEncoder.hidden_states`) are left out. ``keep`` chooses
    other tokens: it takes tokens and positions, and returns a bool mask (all of one shape). Returns ascending positions
    ``(n,)`` int64, and hidden states ``(n, dim)`` float32 on the encoder's device.
    """
    all_positions = []
    all_hidden = []
    for tokens, positions in batches_of(blocks, pad=reader.pad, max_tokens=max_tokens):
        kept = reader.content_mask(tokens) if keep is None else keep(tokens, positions)
        hidden = encoder.hidden_states_of(tokens, kept)
        known = hidden.any(dim=1)
        all_hidden.append(hidden[known])
        all_positions.append(positions[kept][known.cpu()].numpy())
    if not all_positions:
        return np.zeros(0, np.int64), torch.zeros(0, encoder.dim, device=encoder.device)
    merged = np.concatenate(all_positions)
    order = np.argsort(merged, kind="stable")
    return merged[order], torch.cat(all_hidden)[torch.from_numpy(order).to(encoder.device)]
