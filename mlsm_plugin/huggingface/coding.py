"""Code sequences of token ids with a Hugging Face model, and learn coders from them; needs no fairseq."""

import os
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.coding.block_coding import CodingFigures, encode_blocks
from mlsm_plugin.core.coding.coder_fit import fitting_fingerprint
from mlsm_plugin.core.coding.coder_learning import LearningSettings, learn_into
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import HF_PREFIX
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS, ProcessRank
from mlsm_plugin.core.hidden_states.blocks import Block, TokenBlocks
from mlsm_plugin.core.hidden_states.hf_encoder import (
    HuggingFaceEncoder,
    HuggingFaceSource,
    model_and_tokenizer,
    positions_of,
)
from mlsm_plugin.core.sparse_coding.coder import SparseCoder, load_coder
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.unknown_tokens import DEFAULT_MAX_UNK_RATE
from mlsm_plugin.huggingface.token_sequences import InputIds, TokenSequences


def encode_sequences(
    input_ids: InputIds,
    model: PathLike,
    *,
    coder: SparseCoder,
    output: PathLike,
    settings: CodingSettings,
    tokenizer: PathLike | None = None,
    encoder: HuggingFaceEncoder | None = None,
    process: ProcessRank = SINGLE_PROCESS,
) -> CodingFigures:
    """Write this process's shards of a code store, with a row for each token; resumes a stopped run.

    Rows of special tokens (begin, separator, end, padding and mask) are empty; with a coverage below 1, so are rows of
    positions that are not covered. A process that finds all shards present after its own work seals the store.
    ValueError if model, tokenizer, coder and sequences do not fit together, the store was begun with others, or as in
    :func:`~mlsm_plugin.core.coding.block_coding.encode_blocks`.

    Args:
        input_ids: a :class:`TokenSequences`, or its argument. Padding is not attended to; all token types are 0.
        model: folder or hub name of the auxiliary model, with or without ``hf:``.
        coder: codes the hidden states, see :func:`~mlsm_plugin.core.sparse_coding.coder.load_coder`.
        output: folder of the store.
        settings: layer, coverage and the like; its ``blocks`` are ignored, since each sequence is a block.
        tokenizer: folder or hub name of the tokenizer, if it is not in the folder of the model.
        encoder: the model with its tokenizer, if it is already open, with the layer, device and precision of
            ``settings``; ValueError if it is another model or has another layer.
        process: rank of this process, which decides which shards it writes.
    """
    name = _source_name(model)
    fingerprint = fitting_fingerprint(name, coder, settings.layer)
    sequences = TokenSequences.of(input_ids)
    blocks, open_encoder = _blocks_and_encoder(sequences, model, tokenizer, settings, encoder)
    return encode_blocks(
        "sequences",
        blocks,
        Path(output),
        split=sequences.fingerprint,
        auxiliary=fingerprint,
        blocks=None,
        open_model=open_encoder,
        coder=coder,
        settings=settings,
        process=process,
        auxiliary_name=name,
    )


def _source_name(model: PathLike) -> str:
    """The name of a model as a source of hidden states."""
    return HF_PREFIX + os.fspath(model).removeprefix(HF_PREFIX)


def _blocks_and_encoder(
    sequences: TokenSequences,
    model: PathLike,
    tokenizer: PathLike | None,
    settings: CodingSettings | LearningSettings,
    encoder: HuggingFaceEncoder | None,
) -> tuple[TokenBlocks, Callable[[], HuggingFaceEncoder]]:
    """The text, and a function that returns the model, and opens it if necessary; ValueError for another model."""
    if encoder is not None:
        is_of_model = HuggingFaceSource.fingerprint_of(encoder.folder) == HuggingFaceSource.fingerprint_of(model)
        if not is_of_model or encoder.layer != settings.layer:
            raise ValueError(
                f"the encoder gives layer {encoder.layer} of {encoder.folder}, and the settings ask for layer "
                f"{settings.layer} of {model}; pass an encoder of this layer and model, or none"
            )
        blocks, _ = blocks_for_model(sequences, model, encoder.tokenizer)
        return blocks, lambda: encoder
    blocks, opened_tokenizer = blocks_for_model(sequences, model, tokenizer)
    return blocks, lambda: HuggingFaceEncoder(
        model, layer=settings.layer, tokenizer=opened_tokenizer, device=settings.device, fp16=settings.fp16
    )


def learn_from_sequences(
    input_ids: InputIds,
    model: PathLike,
    *,
    output: PathLike,
    settings: LearningSettings,
    tokenizer: PathLike | None = None,
    encoder: HuggingFaceEncoder | None = None,
    overwrite: bool = False,
) -> SparseCoder:
    """Learn a dictionary or a sparse autoencoder, as ``mlsm dictionary`` does, and save it.

    If the folder already has this coder, it is loaded. The training of an autoencoder resumes where it stopped.
    ``overwrite`` replaces another coder in the folder. The other arguments are as in :func:`encode_sequences`.
    ValueError if model, tokenizer and sequences do not fit together, or as in
    :func:`~mlsm_plugin.core.coding.coder_learning.learn_into`.
    """
    sequences = TokenSequences.of(input_ids)
    blocks, open_encoder = _blocks_and_encoder(sequences, model, tokenizer, settings, encoder)
    learn_into(
        Path(output),
        settings,
        blocks,
        open_encoder,
        auxiliary=HuggingFaceSource.fingerprint_of(model),
        split=sequences.fingerprint,
        blocks=None,
        overwrite=overwrite,
        auxiliary_name=_source_name(model),
        text_name=sequences.path,
    )
    return load_coder(output)


class SequenceBlocks(TokenBlocks):
    """Sequences of ids, each as one block; empty sequences are left out. Special tokens have positions, but no codes.

    ``special_ids`` are the ids of all tokens that are not text. ValueError if a sequence has more than ``max_tokens``
    tokens, or an id of ``num_symbols`` or more.
    """

    def __init__(
        self, sequences: TokenSequences, *, pad: int, special_ids: Collection[int], num_symbols: int, max_tokens: int
    ) -> None:
        lengths = np.diff(sequences.starts)
        sequences.check_positions(max_tokens)
        if sequences.largest_id >= num_symbols:
            number = next(index for index in range(len(sequences)) if sequences[index].max(initial=0) >= num_symbols)
            raise ValueError(
                f"sequence {number} has the id {int(sequences[number].max())}, but the model has the ids 0 to "
                f"{num_symbols - 1} only; use sequences of its own tokenizer"
            )
        self.sequences = sequences
        self.pad = pad
        self.num_symbols = num_symbols
        self._numbers = np.flatnonzero(lengths)
        self.num_tokens = sequences.num_tokens
        self.starts = sequences.starts[self._numbers]
        self.sizes = lengths[self._numbers]
        self._special = torch.zeros(num_symbols, dtype=torch.bool)
        self._special[sorted(special_ids)] = True

    def __len__(self) -> int:
        return len(self._numbers)

    def block(self, index: int) -> list[Block]:
        ids = self.sequences[int(self._numbers[index])]
        first = int(self.starts[index])
        return [Block(torch.from_numpy(ids), torch.arange(first, first + len(ids)))]

    def content_mask(self, tokens: Tensor) -> Tensor:
        return ~self._special[tokens]


def blocks_for_model(
    sequences: TokenSequences, model: PathLike, tokenizer: HuggingFaceTokenizer | PathLike | None = None
) -> tuple[SequenceBlocks, HuggingFaceTokenizer]:
    """The sequences as blocks for a model, and the tokenizer, which decides which tokens are special; reads no weights.

    ValueError as in :func:`~mlsm_plugin.core.hidden_states.hf_encoder.model_and_tokenizer`, or if the sequences do not
    fit model and tokenizer, or have too many unknown tokens.
    """
    _, config, opened_tokenizer = model_and_tokenizer(model, tokenizer)
    folder = opened_tokenizer.folder
    remedy = f"make them with `mlsm binarize --format sequences --tokenizer hf:{folder}`"
    sequences.check_made_with(opened_tokenizer.vocabulary_fingerprint, "the sequences", str(folder), remedy=remedy)
    # sequences of `mlsm binarize --format sequences` were checked when they were written
    if "max_unk_rate" not in sequences.about:
        remedy = "to code it all the same, make the sequences with `mlsm binarize --format sequences --max-unk-rate`"
        unknown = sequences.unknown_tokens(opened_tokenizer)
        unknown.check("the sequences", DEFAULT_MAX_UNK_RATE, remedy=remedy)
    blocks = SequenceBlocks(
        sequences,
        pad=opened_tokenizer.pad_id,
        special_ids=opened_tokenizer.special_ids,
        num_symbols=int(config.vocab_size),
        max_tokens=positions_of(config),
    )
    return blocks, opened_tokenizer
