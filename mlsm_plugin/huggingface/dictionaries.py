"""Learns a sparse coder from sequences of token ids and a Hugging Face model; needs no fairseq."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlsm_plugin.auxiliary.coder_learning import LearningSettings, learn_into, learning_plan
from mlsm_plugin.hidden_states.library_encoder import LibraryEncoder
from mlsm_plugin.hidden_states.sources import source_of
from mlsm_plugin.huggingface.coding import PathLike, as_sequences, source_name
from mlsm_plugin.huggingface.sequence_blocks import blocks_for_model
from mlsm_plugin.sparse_coding.coder import load_coder
from mlsm_plugin.sparse_coding.sparse_coder import SparseCoder


def learn_from_sequences(
    input_ids: Any,
    model: PathLike,
    *,
    output: PathLike,
    settings: LearningSettings,
    tokenizer: PathLike | None = None,
    overwrite: bool = False,
) -> SparseCoder:
    """Learn a dictionary or a sparse autoencoder, as ``mlsm dictionary`` does, and save it.

    Its ``meta.json`` says the layer, the fingerprints of the model and of the sequences, and how it was learned. If
    this very coder is already there, it is loaded. The training of an autoencoder resumes where it was stopped.

    Args:
        input_ids: sequences of ids, special tokens included, of any kind that
            :class:`~mlsm_plugin.huggingface.token_sequences.TokenSequences` takes.
        model: folder or hub name of the auxiliary model, with or without ``hf:``.
        output: folder of the coder.
        settings: what is learned.
        tokenizer: folder or hub name of the tokenizer, if it does not lie beside the model.
        overwrite: replace another coder that is already there.

    Returns:
        the coder, loaded from its folder.

    Raises:
        ValueError: model, tokenizer and sequences do not belong together, or as of
            :func:`~mlsm_plugin.auxiliary.coder_learning.learn_into`.
    """
    name, folder = source_name(model), Path(output)
    sequences = as_sequences(input_ids)
    blocks, found = blocks_for_model(sequences, model, tokenizer)
    plan = learning_plan(
        settings,
        auxiliary=source_of(name).fingerprint_of(name),
        split=sequences.fingerprint,
        blocks=None,
    )
    learn_into(
        *(folder, settings, plan, blocks),
        lambda: LibraryEncoder(
            model, layer=settings.layer, tokenizer=found, device=settings.device, fp16=settings.fp16
        ),
        overwrite=overwrite,
    )
    return load_coder(folder)
