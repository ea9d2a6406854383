"""Token sequences as the blocks that a model reads: each sequence is one block."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.files.hf_files import hf_folder
from mlsm_plugin.hidden_states.blocks import Block, TokenBlocks
from mlsm_plugin.hidden_states.library_encoder import check_vocabulary, positions_of, supported_config
from mlsm_plugin.tokenization.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.tokenization.unknown_tokens import DEFAULT_MAX_UNK_RATE

if TYPE_CHECKING:
    from mlsm_plugin.huggingface.token_sequences import TokenSequences


class SequenceBlocks(TokenBlocks):
    """Sequences of ids, special tokens included, each of them one block; empty ones are left out.

    All tokens have positions, those of :class:`~mlsm_plugin.huggingface.token_sequences.TokenSequences`. The special
    ones are not coded.

    Args:
        sequences: the text.
        pad: the id of padding.
        special_ids: ids of the tokens that are no text, ``pad`` among them.
        num_symbols: number of ids of the model.
        max_tokens: longest sequence that the model takes.

    Raises:
        ValueError: a sequence is too long, or holds an id that the model does not have.
    """

    def __init__(
        self, sequences: TokenSequences, *, pad: int, special_ids: Collection[int], num_symbols: int, max_tokens: int
    ) -> None:
        lengths = np.diff(sequences.starts)
        longest = int(lengths.argmax())
        if lengths[longest] > max_tokens:
            raise ValueError(
                f"sequence {longest} has {lengths[longest]} tokens, but the model takes at most {max_tokens}; cut the "
                f"sequences, for example with `mlsm binarize --format sequences --max-length {max_tokens}`"
            )
        if sequences.largest_id >= num_symbols:
            raise ValueError(_without_embedding(sequences, num_symbols))
        self.sequences = sequences
        self._pad = pad
        self._numbers = np.flatnonzero(lengths)
        self.num_tokens = sequences.num_tokens
        self.starts, self.sizes = sequences.starts[self._numbers], lengths[self._numbers]
        self._special = torch.zeros(num_symbols, dtype=torch.bool)
        self._special[sorted(special_ids)] = True

    @property
    def pad(self) -> int:
        """The id of padding."""
        return self._pad

    def __len__(self) -> int:
        return len(self._numbers)

    def block(self, index: int) -> list[Block]:
        """Block ``index``, which is a whole sequence."""
        ids = self.sequences[int(self._numbers[index])]
        first = int(self.starts[index])
        return [Block(torch.from_numpy(ids), torch.arange(first, first + len(ids)))]

    def content_mask(self, tokens: Tensor) -> Tensor:
        """Which of ``tokens`` (any shape) are not special (bool); an unknown token is content."""
        return ~self._special[tokens]


def blocks_for_model(
    sequences: TokenSequences, model: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None
) -> tuple[SequenceBlocks, HuggingFaceTokenizer]:
    """The sequences as blocks for a model, and the tokenizer that says which tokens are special.

    Args:
        sequences: the text.
        model: folder or hub name, with or without ``hf:``; its weights are not read.
        tokenizer: folder or hub name of the tokenizer, if it does not lie beside the model.

    Raises:
        ValueError: the model or the tokenizer does not exist or is not supported, they do not fit each other, or the
            sequences do not fit them, or have too many unknown tokens.
    """
    folder = hf_folder(model)
    config = supported_config(folder)
    found = HuggingFaceTokenizer(folder if tokenizer is None else tokenizer)
    check_vocabulary(found, int(config.vocab_size), folder)
    made_with = sequences.about.get("tokenizer")
    if made_with not in (None, found.vocabulary_fingerprint):
        raise ValueError(
            f"the sequences were made with a tokenizer of another vocabulary than that of {found.folder}; make them "
            f"with `mlsm binarize --format sequences --tokenizer {found.folder}`"
        )
    # sequences of `mlsm binarize --format sequences` were checked when they were written
    if "max_unk_rate" not in sequences.about:
        remedy = (
            "to code such text all the same, make the sequences with `mlsm binarize --format sequences --max-unk-rate`"
        )
        sequences.unknown_tokens(found).check("the sequences", DEFAULT_MAX_UNK_RATE, remedy=remedy)
    blocks = SequenceBlocks(
        sequences,
        pad=found.pad_id,
        special_ids=found.special_ids,
        num_symbols=int(config.vocab_size),
        max_tokens=positions_of(config),
    )
    return blocks, found


def _without_embedding(sequences: TokenSequences, num_symbols: int) -> str:
    number = next(index for index in range(len(sequences)) if sequences[index].max(initial=0) >= num_symbols)
    largest = int(sequences[number].max())
    return (
        f"sequence {number} has the id {largest}, but the model has the ids 0 to {num_symbols - 1} only; use sequences "
        "of its own tokenizer"
    )
