"""Codes a whole binarized split: blocks become hidden states, then sparse codes, then a code store."""

from __future__ import annotations

import os
from pathlib import Path

from mlsm_plugin.auxiliary.block_coding import (
    TOKENS_TO_JUDGE_EMPTINESS,
    CodingFigures,
    encode_blocks,
    shard_boundaries,
    store_meta,
)
from mlsm_plugin.auxiliary.coder_fit import fitting_encoder, fitting_fingerprint
from mlsm_plugin.auxiliary.split_coder import CodingSettings
from mlsm_plugin.data.token_blocks import split_fingerprint
from mlsm_plugin.files.work_share import ALL_OF_IT, WorkShare
from mlsm_plugin.hidden_states.block_reader import BlockReader
from mlsm_plugin.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.sparse_coding.coder import SparseCoder

__all__ = ["TOKENS_TO_JUDGE_EMPTINESS", "CodingFigures", "encode_split", "open_coding_model", "shard_boundaries"]


def encode_split(
    data_bin: str | os.PathLike[str],
    split: str,
    *,
    auxiliary: str | os.PathLike[str],
    coder: SparseCoder,
    settings: CodingSettings,
    device: str | None = None,
    share: WorkShare = ALL_OF_IT,
    output: str | os.PathLike[str] | None = None,
) -> CodingFigures:
    """Write this process's shards of ``OUTPUT/<split>.codes``; resumes a stopped run.

    A process that finds no shard missing after its own work seals the store. ``OUTPUT`` is the dataset by default.

    Raises:
        ValueError: the files do not belong together, a store made with other settings exists, all codes of a shard are
            empty, or codes cannot be written (see :meth:`SplitCoder.coded_chunks`).
        FileNotFoundError: the split or the checkpoint is missing.
    """
    directory = Path(output or data_bin) / f"{split}.codes"
    fingerprint = fitting_fingerprint(auxiliary, coder, settings.layer)
    reader = BlockReader(data_bin, split, settings.blocks)
    own = split_fingerprint(Path(data_bin) / split)
    return encode_blocks(
        *(split, reader, directory),
        meta=store_meta(coder, settings, split=own, auxiliary=fingerprint, blocks=settings.blocks),
        open_model=lambda: open_coding_model(auxiliary, data_bin, coder, settings, device),
        coder=coder,
        settings=settings,
        share=share,
    )


def open_coding_model(
    auxiliary: str | os.PathLike[str],
    data_bin: str | os.PathLike[str],
    coder: SparseCoder,
    settings: CodingSettings,
    device: str | None,
) -> HiddenStateEncoder:
    """The auxiliary model.

    Raises:
        ValueError: the coder or the blocks do not fit the model.
        FileNotFoundError: the checkpoint is missing.
    """
    return fitting_encoder(
        auxiliary, data_bin, coder, layer=settings.layer, tokens_per_sample=settings.blocks.tokens_per_sample,
        device=device, fp16=settings.fp16,
    )  # fmt: skip
