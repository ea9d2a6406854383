"""A binarized split as the auxiliary model reads it: blocks in order, with their positions."""

import os

import numpy as np
from fairseq.data import FairseqDataset, PrependTokenDataset
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.hidden_states.blocks import Block, TokenBlocks, batches_of, hidden_states_of
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.fairseq_plugin.data.token_blocks import cut_into_blocks, is_content, load_dictionary, load_split
from mlsm_plugin.fairseq_plugin.data.token_datasets import NO_POSITION, TokenPositionsDataset

__all__ = ["Block", "BlockReader", "BlockSettings", "batches_of", "hidden_states_of"]


class BlockReader(TokenBlocks):
    """Blocks of a binarized split, in order. ``tokens`` has the samples with BOS: blocks, or pieces of long blocks."""

    def __init__(self, data_bin: PathLike, split: str, settings: BlockSettings) -> None:
        self.dictionary = load_dictionary(data_bin)
        self.pad = int(self.dictionary.pad())
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

    def _cut(self, dataset: FairseqDataset, bos: int) -> PrependTokenDataset:
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
        return [Block(self.tokens[piece], self._positions[piece]) for piece in self._pieces.pieces_of(index)]

    def flat_tokens(self, first: int, last: int) -> np.ndarray:
        """Ids ``(last - first,)`` of the tokens at flat positions from ``first`` to before ``last``."""
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
        return is_content(tokens, self.dictionary)
