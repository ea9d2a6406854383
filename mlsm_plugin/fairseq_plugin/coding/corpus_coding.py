"""Code a whole binarized split: blocks become hidden states, then sparse codes, then a code store."""

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from mlsm_plugin.core.coding.block_coding import CodingFigures, encode_blocks
from mlsm_plugin.core.coding.coder_fit import check_sample_length, fitting_encoder, fitting_fingerprint
from mlsm_plugin.core.coding.coder_learning import LearningSettings, learn_into
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS, ProcessRank
from mlsm_plugin.core.hidden_states.encoder import HiddenStateSource
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.hidden_states.sources import alignment_of, open_encoder, source_of
from mlsm_plugin.core.sparse_coding.coder import SparseCoder
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader
from mlsm_plugin.fairseq_plugin.data.token_blocks import split_fingerprint

# takes the name of a split and the function that codes it, calls it, and may show the figures
Coded = Callable[[str, Callable[[], CodingFigures]], object]


def splits_encoder(
    data_bin: PathLike,
    *,
    auxiliary: PathLike,
    coder: SparseCoder,
    settings: CodingSettings,
    process: ProcessRank = SINGLE_PROCESS,
    output: PathLike | None = None,
) -> Callable[[str], CodingFigures]:
    """A function that codes a split by :func:`encode_split`; the model is opened once for all splits."""
    return partial(
        encode_split,
        data_bin,
        auxiliary=auxiliary,
        coder=coder,
        settings=settings,
        process=process,
        output=output,
        open_model=cache(lambda: fitting_encoder(auxiliary, data_bin, coder, settings)),
    )


def encode_split(
    data_bin: PathLike,
    split: str,
    *,
    auxiliary: PathLike,
    coder: SparseCoder,
    settings: CodingSettings,
    process: ProcessRank = SINGLE_PROCESS,
    output: PathLike | None = None,
    open_model: Callable[[], HiddenStateSource] | None = None,
) -> CodingFigures:
    """Write this process's shards of ``OUTPUT/<split>.codes``; ``OUTPUT`` is the dataset by default.

    ``open_model`` opens the auxiliary model if there is something to code; None: open it for this split alone.

    FileNotFoundError if the split or the checkpoint is missing; ValueError if the files do not belong together, or as
    for :func:`~mlsm_plugin.core.coding.block_coding.encode_blocks`, which also explains the result.
    """
    directory = Path(output or data_bin) / f"{split}.codes"
    fingerprint = fitting_fingerprint(auxiliary, coder, settings.layer)
    reader = BlockReader(data_bin, split, settings.blocks)
    return encode_blocks(
        split,
        reader,
        directory,
        split=split_fingerprint(Path(data_bin) / split),
        auxiliary=fingerprint,
        blocks=settings.blocks,
        open_model=open_model or (lambda: fitting_encoder(auxiliary, data_bin, coder, settings)),
        coder=coder,
        settings=settings,
        process=process,
        auxiliary_name=os.fspath(auxiliary),
        alignment=alignment_of(auxiliary, data_bin),
    )


def learn_from_split(
    data_bin: PathLike,
    auxiliary: str,
    output: Path,
    settings: LearningSettings,
    blocks: BlockSettings,
    *,
    overwrite: bool = False,
) -> bool:
    """Learn a coder from the hidden states of the split ``train``; result and errors as for :func:`learn_into`."""

    def open_model() -> HiddenStateSource:
        encoder = open_encoder(auxiliary, data_bin, layer=settings.layer, device=settings.device, fp16=settings.fp16)
        check_sample_length(encoder, blocks.tokens_per_sample)
        return encoder

    return learn_into(
        output,
        settings,
        BlockReader(data_bin, "train", blocks),
        open_model,
        auxiliary=source_of(auxiliary).fingerprint_of(auxiliary),
        split=split_fingerprint(Path(data_bin) / "train"),
        blocks=blocks,
        overwrite=overwrite,
        auxiliary_name=auxiliary,
        text_name=str(Path(data_bin).absolute() / "train"),
        alignment=alignment_of(auxiliary, data_bin),
    )
