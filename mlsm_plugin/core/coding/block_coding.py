"""Codes a text block by block into a code store, resumable, in shards that processes share."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mlsm_plugin.core.coding.coder_fit import check_width
from mlsm_plugin.core.coding.split_coder import CodingSettings, SplitCoder
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS, ProcessRank
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.files.recorded_names import without_place
from mlsm_plugin.core.files.sharded_store import MissingShardsError, warn_of_full_disk
from mlsm_plugin.core.hidden_states.blocks import TokenBlocks
from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.core.sparse_coding.coder import SparseCoder
from mlsm_plugin.core.sparse_coding.stored_codes import ShardRows

logger = logging.getLogger(__name__)

# Only empty codes are an error in a shard with at least this many coded tokens, or in one that is the whole split. All
# codes of a short last shard may well be empty.
TOKENS_TO_JUDGE_EMPTINESS = 32


@dataclass
class CodingFigures:
    """The result of coding a text into a store."""

    directory: Path  # of the store
    num_shards: int
    already_complete: bool = False  # before this run
    coded_tokens: int = 0  # by this process in this run
    empty_tokens: int = 0  # coded tokens whose codes are empty
    inexact_tokens: int = 0  # coded tokens whose codes do not reach the required accuracy
    missing_shards: int = 0  # shards that other processes have not written yet
    meta: JsonObject | None = None  # content of the store's meta.json; None while shards are missing


def encode_blocks(
    name: str,
    reader: TokenBlocks,
    directory: Path,
    *,
    split: str,
    auxiliary: str,
    blocks: BlockSettings | None,
    open_model: Callable[[], HiddenStateEncoder],
    coder: SparseCoder,
    settings: CodingSettings,
    process: ProcessRank = SINGLE_PROCESS,
    auxiliary_name: str | None = None,
    alignment: str | None = None,
) -> CodingFigures:
    """Write this process's shards of a store; resumes a stopped run.

    The process that writes the last missing shard seals the store. ValueError if the coder and the model differ in
    width, the store was made with other settings, all codes of a shard are empty, or codes cannot be written (see
    :meth:`SplitCoder.coded_chunks`).

    Args:
        name, reader: name of the text, for the progress bar and errors, and the text.
        split, auxiliary: fingerprints of the text and of the model.
        blocks: how the text was cut; None if it came in blocks.
        auxiliary_name: name of the model for reports; only the last two parts of a path are recorded.
        alignment: how the model reads a text of another vocabulary, see :func:`alignment_of`; None: its ids.
        open_model: opens the model; called only if there is something to code.
    """
    meta = store_meta(coder, settings, split=split, auxiliary=auxiliary, blocks=blocks, alignment=alignment)
    boundaries = shard_boundaries(reader, settings.shard_tokens)
    writer = CodeStoreWriter(directory, meta, boundaries, with_gaps=coder.has_gaps)
    figures = CodingFigures(writer.directory, writer.num_shards)
    missing = writer.missing_shards()
    figures.already_complete = not missing and writer.is_sealed
    own_shards = [shard for shard in missing if process.owns(shard[0])]
    if own_shards:
        if process.rank == 0 and writer.num_shards < process.world_size:
            logger.warning(
                "%s: %d processes share %d shards, so some have nothing to do; use a smaller --shard-tokens",
                name,
                process.world_size,
                writer.num_shards,
            )
        tokens_of_others = sum(stop - start for _, start, stop in missing) - sum(
            stop - start for _, start, stop in own_shards
        )
        encoder = open_model()
        check_width(encoder, coder)
        _write_shards(SplitCoder(name, reader, encoder, coder, settings), writer, own_shards, figures, tokens_of_others)
    figures.missing_shards = len(writer.missing_shards())
    if not figures.missing_shards:
        try:
            figures.meta = writer.finish(without_place(auxiliary_name))
        except MissingShardsError:  # another process without a share of its own writes one again
            figures.missing_shards = max(1, len(writer.missing_shards()))
    return figures


def shard_boundaries(reader: TokenBlocks, shard_tokens: int) -> list[int]:
    """Token offsets where shards begin, then the end of the text. Shards begin about ``shard_tokens`` apart.

    They begin at block starts, so a shard depends only on its own blocks.
    """
    boundaries = [0]
    while boundaries[-1] + shard_tokens < reader.num_tokens:
        following = np.searchsorted(reader.starts, boundaries[-1] + shard_tokens)
        if following == len(reader.starts):
            break
        boundaries.append(int(reader.starts[following]))
    return [*boundaries, reader.num_tokens]


def store_meta(
    coder: SparseCoder,
    settings: CodingSettings,
    *,
    split: str,
    auxiliary: str,
    blocks: BlockSettings | None,
    alignment: str | None = None,
) -> JsonObject:
    """Content of ``plan.json`` and ``meta.json`` of a store; arguments are those of :func:`encode_blocks`."""
    return {
        "n_atoms": coder.num_atoms,
        **coder.settings(),
        "layer": settings.layer,
        "coverage": settings.coverage,
        "coverage_seed": settings.coverage_seed if settings.coverage < 1 else 0,
        "fp16": settings.fp16,
        **({"latent_top": settings.latent_top, "latent_select": "weight"} if settings.latent_top else {}),
        **({"blocks": asdict(blocks)} if blocks else {}),
        "dictionary_health": coder.meta.get("health"),
        "fingerprints": {
            "split": split,
            "dictionary": coder.fingerprint,
            "auxiliary": auxiliary,
            **({"alignment": alignment} if alignment else {}),
        },
    }


def _write_shards(
    coder: SplitCoder,
    writer: CodeStoreWriter,
    shards: list[tuple[int, int, int]],
    figures: CodingFigures,
    tokens_of_others: int,
) -> None:
    """Code and write ``shards``; warn once if the disk has too little room for the missing shards."""
    remaining = sum(stop - start for _, start, stop in shards)
    with Progress(total=remaining, desc=f"coding {coder.split}", unit="token", unit_scale=True) as progress:
        for number, (index, start, stop) in enumerate(shards):
            if writer.has_shard(index):  # another process has already written it
                progress.update(stop - start)
                continue
            rows = ShardRows(stop - start, writer.num_atoms)
            counted = 0
            why_empty = None
            for chunk in coder.coded_chunks(range(*np.searchsorted(coder.reader.starts, (start, stop)))):
                rows.add(chunk.positions - start, chunk.coded.codes, chunk.coded.gap)
                why_empty = why_empty or chunk.why_empty
                figures.empty_tokens += int((np.diff(chunk.coded.codes.indptr) == 0).sum())
                figures.inexact_tokens += chunk.inexact
                counted += len(chunk.positions)
                progress.update(len(chunk.positions))
            fewest = 1 if stop - start == coder.reader.num_tokens else TOKENS_TO_JUDGE_EMPTINESS
            if rows.nonzeros == 0 and rows.coded_tokens >= fewest:
                raise ValueError(
                    f"{coder.split}: the codes of all {rows.coded_tokens} coded tokens from {start} to {stop - 1} are "
                    f"empty, since {why_empty or 'all weights round to 0'}"
                )
            writer.write_shard(index, rows)
            figures.coded_tokens += rows.coded_tokens
            remaining -= stop - start
            if number == 0:
                per_token = sum(array.nbytes for array in rows.arrays().values()) / (stop - start)
                warn_of_full_disk(writer.directory, per_token * (remaining + tokens_of_others))
            progress.update(stop - start - counted)  # tokens that are not coded also count as done
