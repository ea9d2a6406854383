"""A binarized split as the auxiliary model reads it: batches of blocks, in order, with their positions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.data.token_blocks import cut_into_blocks, is_content, load_dictionary, load_split
from mlsm_plugin.data.token_positions_dataset import NO_POSITION, TokenPositionsDataset
from mlsm_plugin.hidden_states.encoder import TokenVectors


@dataclass(frozen=True)
class BlockSettings:
    """How a split is cut into blocks for the auxiliary model.

    Attributes:
        tokens_per_sample: longest block with its BOS; a longer one is cut.
        sample_break_mode: ``none``, ``complete``, ``complete_doc`` or ``eos``, as fairseq has them.
    """

    tokens_per_sample: int = 512
    sample_break_mode: str = "complete"

    def __post_init__(self) -> None:
        if self.tokens_per_sample < 2:
            raise ValueError(f"--tokens-per-sample must be at least 2 (BOS and a token), got {self.tokens_per_sample}")


@dataclass(frozen=True)
class Block:
    """Tokens ``(T,)`` with BOS, and their flat positions ``(T,)`` in the split (BOS: -1)."""

    tokens: Tensor
    positions: Tensor


class BlockReader:
    """Blocks of a binarized split in corpus order.

    Args:
        data_bin, split: the binarized split.
        settings: how the split is cut into blocks.

    Attributes:
        num_tokens: tokens of the split, special symbols included.
        tokens: the samples, each with its BOS; a sample is a block, or a piece of a block that is too long.
        starts: flat position of each block's first token, ``(n_blocks,)``, ascending.
        sizes: number of tokens of each block without BOS, ``(n_blocks,)``.
    """

    def __init__(self, data_bin: str | os.PathLike[str], split: str, settings: BlockSettings) -> None:
        self.dictionary = load_dictionary(data_bin)
        dataset = load_split(os.path.join(data_bin, split), self.dictionary)
        self._sentences = dataset
        self._sentence_starts = np.cumsum(dataset.sizes, dtype=np.int64) - dataset.sizes
        self.settings = settings
        self.num_tokens = int(dataset.sizes.sum(dtype=np.int64))
        self.tokens = self._cut(dataset, self.dictionary.bos())
        self._positions = self._cut(TokenPositionsDataset(dataset.sizes), NO_POSITION)
        self._pieces = self.tokens.dataset
        self.starts = self._pieces.block_starts
        self.sizes = self._pieces.block_sizes

    def _cut(self, dataset: Any, bos: int) -> Any:
        return cut_into_blocks(
            dataset,
            dictionary=self.dictionary,
            tokens_per_sample=self.settings.tokens_per_sample,
            sample_break_mode=self.settings.sample_break_mode,
            bos=bos,
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def block(self, index: int) -> list[Block]:
        """Block ``index``, in several pieces if it is longer than ``tokens_per_sample``."""
        return [Block(self.tokens[piece], self._positions[piece]) for piece in self._pieces.pieces_of(index)]

    def flat_tokens(self, first: int, last: int) -> np.ndarray:
        """Ids ``(last - first,)`` of the tokens at flat positions ``first`` to ``last``, which is excluded."""
        sentence = int(np.searchsorted(self._sentence_starts, first, side="right")) - 1
        offset = first - int(self._sentence_starts[sentence])
        parts: list[np.ndarray] = []
        size = -offset
        while size < last - first:
            parts.append(self._sentences[sentence].numpy())
            size += len(parts[-1])
            sentence += 1
        return np.concatenate(parts)[offset : offset + last - first] if parts else np.zeros(0, np.int64)

    def content_mask(self, tokens: Tensor) -> Tensor:
        """Which of ``tokens`` (any shape) are neither special symbols nor padding; only those are coded."""
        return is_content(tokens, self.dictionary)


def batches_of(blocks: list[Block], *, pad: int, max_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Right-padded batches of blocks of similar length: tokens ``(B, T)`` and positions ``(B, T)`` (padding: -1).

    The order, and with it every bit of the result, depends on ``blocks`` and ``max_tokens`` only.
    """
    order = sorted(range(len(blocks)), key=lambda i: -len(blocks[i].tokens))
    while order:
        longest = len(blocks[order[0]].tokens)
        count = max(1, max_tokens // longest)
        chosen, order = [blocks[i] for i in order[:count]], order[count:]
        tokens = torch.full((len(chosen), longest), pad)
        positions = torch.full((len(chosen), longest), NO_POSITION)
        for row, block in enumerate(chosen):
            tokens[row, : len(block.tokens)] = block.tokens
            positions[row, : len(block.tokens)] = block.positions
        yield tokens, positions


def hidden_states_of(
    blocks: list[Block],
    reader: BlockReader,
    encoder: TokenVectors,
    *,
    max_tokens: int,
    keep: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[np.ndarray, Tensor]:
    """Hidden states of the content tokens of ``blocks``, in corpus order.

    Args:
        blocks, reader, encoder: the text and the model.
        max_tokens: tokens in one forward pass.
        keep: a function of tokens and positions (both of one shape) that returns whose hidden states are wanted (bool,
            the same shape); None for those of all content tokens.

    Returns:
        positions ``(n,)`` int64, ascending, and hidden states ``(n, dim)`` float32 on the encoder's device.
    """
    all_positions, all_hidden = [], []
    for tokens, positions in batches_of(blocks, pad=reader.dictionary.pad(), max_tokens=max_tokens):
        kept = reader.content_mask(tokens) if keep is None else keep(tokens, positions)
        all_hidden.append(encoder.hidden_states(tokens)[kept.to(encoder.device)])
        all_positions.append(positions[kept].numpy())
    if not all_positions:
        return np.zeros(0, np.int64), torch.zeros(0, encoder.dim, device=encoder.device)
    merged = np.concatenate(all_positions)
    order = np.argsort(merged, kind="stable")
    return merged[order], torch.cat(all_hidden)[torch.from_numpy(order).to(encoder.device)]
