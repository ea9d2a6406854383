"""Codes a whole binarized split: blocks become hidden states, then sparse codes, then a code store."""

from __future__ import annotations

import os
from pathlib import Path

from mlsm_plugin.auxiliary.block_coding import CodingEstimate, CodingFigures, encode_blocks, estimate_blocks, store_meta
from mlsm_plugin.auxiliary.coder_fit import fitting_encoder, fitting_fingerprint
from mlsm_plugin.auxiliary.split_coder import CodingSettings
from mlsm_plugin.data.token_blocks import split_fingerprint
from mlsm_plugin.files.planned_folder import recorded_in
from mlsm_plugin.files.work_share import ALL_OF_IT, WorkShare
from mlsm_plugin.hidden_states.block_reader import BlockReader
from mlsm_plugin.sparse_coding.coder import SparseCoder


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
    recorded = recorded_in(directory, "meta", "fingerprints", "auxiliary")
    fingerprint = fitting_fingerprint(auxiliary, coder, settings.layer, recorded=recorded)
    reader = BlockReader(data_bin, split, settings.blocks)
    own = split_fingerprint(Path(data_bin) / split)
    return encode_blocks(
        *(split, reader, directory),
        meta=store_meta(coder, settings, split=own, auxiliary=fingerprint, blocks=settings.blocks),
        open_model=lambda: fitting_encoder(auxiliary, data_bin, coder, settings, device),
        coder=coder,
        settings=settings,
        share=share,
    )


def estimate_split(
    data_bin: str | os.PathLike[str],
    split: str,
    *,
    auxiliary: str | os.PathLike[str],
    coder: SparseCoder,
    settings: CodingSettings,
    device: str | None = None,
    share: WorkShare = ALL_OF_IT,
) -> CodingEstimate:
    """What :func:`encode_split` would cost, from evenly spread blocks; the errors are those of it."""
    fitting_fingerprint(auxiliary, coder, settings.layer)
    reader = BlockReader(data_bin, split, settings.blocks)
    encoder = fitting_encoder(auxiliary, data_bin, coder, settings, device)
    return estimate_blocks(split, reader, encoder, coder, settings, share=share)
