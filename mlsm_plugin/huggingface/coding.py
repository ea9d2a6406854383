"""Codes sequences of token ids with a Hugging Face model, into a code store; needs no fairseq."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlsm_plugin.auxiliary.block_coding import CodingEstimate, CodingFigures, encode_blocks, estimate_blocks, store_meta
from mlsm_plugin.auxiliary.coder_fit import check_width, fitting_fingerprint
from mlsm_plugin.auxiliary.split_coder import CodingSettings
from mlsm_plugin.files.hf_files import HF_PREFIX
from mlsm_plugin.files.planned_folder import recorded_in
from mlsm_plugin.files.work_share import ALL_OF_IT, WorkShare
from mlsm_plugin.hidden_states.library_encoder import LibraryEncoder
from mlsm_plugin.huggingface.sequence_blocks import blocks_for_model
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from mlsm_plugin.sparse_coding.coder import SparseCoder

PathLike = str | os.PathLike[str]


def source_name(model: PathLike) -> str:
    """The name of a model among the sources of hidden states, ``hf:`` and its folder or hub name."""
    return HF_PREFIX + os.fspath(model).removeprefix(HF_PREFIX)


def as_sequences(input_ids: Any) -> TokenSequences:
    """``input_ids`` as :class:`TokenSequences`, whose kinds and errors apply."""
    return input_ids if isinstance(input_ids, TokenSequences) else TokenSequences(input_ids)


def encode_sequences(
    input_ids: Any,
    model: PathLike,
    *,
    coder: SparseCoder,
    output: PathLike,
    settings: CodingSettings,
    tokenizer: PathLike | None = None,
    device: str | None = None,
    share: WorkShare = ALL_OF_IT,
) -> CodingFigures:
    """Write this process's shards of a code store; resumes a stopped run.

    The store has a row for each token of the sequences, in their order. Rows of special tokens (those that begin,
    separate, end, pad and mask) are empty, and at a coverage below 1 also those of the other positions. A process that
    finds no shard missing after its own work seals the store.

    Args:
        input_ids: sequences of ids, special tokens included, of any kind that :class:`TokenSequences` takes. The id of
            padding is not attended to, and all token types are 0.
        model: folder or hub name of the auxiliary model, with or without ``hf:``.
        coder: what codes the hidden states, see :func:`~mlsm_plugin.sparse_coding.coder.load_coder`.
        output: folder of the store.
        settings: layer, coverage and the like; its ``blocks`` do not matter, since each sequence is a block.
        tokenizer: folder or hub name of the tokenizer, if it does not lie beside the model.
        device: device of the model and the solver; None for the GPU if there is one.
        share: the part of the shards that this process codes.

    Raises:
        ValueError: model, tokenizer, coder and sequences do not belong together, the store was begun with other
            settings or sequences, all codes of a shard are empty, or codes cannot be written (see
            :meth:`~mlsm_plugin.auxiliary.split_coder.SplitCoder.coded_chunks`).
    """
    name = source_name(model)
    recorded = recorded_in(output, "meta", "fingerprints", "auxiliary")
    fingerprint = fitting_fingerprint(name, coder, settings.layer, recorded=recorded)
    sequences = as_sequences(input_ids)
    blocks, found = blocks_for_model(sequences, model, tokenizer)

    def open_model() -> LibraryEncoder:
        encoder = LibraryEncoder(model, layer=settings.layer, tokenizer=found, device=device, fp16=settings.fp16)
        check_width(encoder, coder)
        return encoder

    return encode_blocks(
        *("sequences", blocks, Path(output)),
        meta=store_meta(coder, settings, split=sequences.fingerprint, auxiliary=fingerprint, blocks=None),
        open_model=open_model,
        coder=coder,
        settings=settings,
        share=share,
    )


def estimate_sequences(
    input_ids: Any,
    model: PathLike,
    *,
    coder: SparseCoder,
    settings: CodingSettings,
    tokenizer: PathLike | None = None,
    device: str | None = None,
    share: WorkShare = ALL_OF_IT,
) -> CodingEstimate:
    """What :func:`encode_sequences` would cost, from a small sample; arguments and errors are those of it."""
    fitting_fingerprint(source_name(model), coder, settings.layer)
    blocks, found = blocks_for_model(as_sequences(input_ids), model, tokenizer)
    encoder = LibraryEncoder(model, layer=settings.layer, tokenizer=found, device=device, fp16=settings.fp16)
    check_width(encoder, coder)
    return estimate_blocks("sequences", blocks, encoder, coder, settings, share=share)
