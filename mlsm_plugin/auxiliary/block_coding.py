"""Codes a text block by block into a code store, resumable, in shards that processes share; or estimates the cost."""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsm_plugin.auxiliary.split_coder import CodingSettings, SplitCoder
from mlsm_plugin.files.progress import Progress
from mlsm_plugin.files.sharded_store import MissingShardsError, warn_of_full_disk
from mlsm_plugin.files.work_share import ALL_OF_IT, WorkShare
from mlsm_plugin.hidden_states.blocks import TokenBlocks
from mlsm_plugin.hidden_states.encoder import TokenVectors
from mlsm_plugin.hidden_states.settings import BlockSettings
from mlsm_plugin.sparse_coding.code_store import INDPTR_DTYPE, WEIGHT_DTYPE, CodeStoreWriter, ShardRows, atom_dtype
from mlsm_plugin.sparse_coding.coder import SparseCoder

logger = logging.getLogger(__name__)

# A shard with only empty codes is refused if it has at least this many of them, or is the whole split. All codes of a
# short last shard may well be empty.
TOKENS_TO_JUDGE_EMPTINESS = 32
# Tokens of the sample to code; never less than a batch, so that the memory of a batch is measured.
SAMPLE_TOKENS = 4096
# Largest number of tokens of text in the sample, or a batch if that is more; it limits the sample at low coverage.
MAX_SAMPLE_TEXT = 1 << 16


@dataclass
class CodingFigures:
    """The result of coding a text.

    Attributes:
        directory: folder of the store.
        num_shards: number of shards of the store.
        already_complete: whether the store was complete before.
        coded_tokens: tokens that this process coded now.
        empty_tokens: those of them whose codes are empty: they have no target.
        inexact_tokens: those of them whose codes do not reach the required accuracy.
        missing_shards: shards that other processes have not written yet.
        meta: content of the store's ``meta.json``; None while shards are missing.
    """

    directory: Path
    num_shards: int
    already_complete: bool = False
    coded_tokens: int = 0
    empty_tokens: int = 0
    inexact_tokens: int = 0
    missing_shards: int = 0
    meta: dict[str, Any] | None = None


def encode_blocks(
    name: str,
    reader: TokenBlocks,
    directory: Path,
    *,
    meta: dict[str, Any],
    open_model: Callable[[], TokenVectors],
    coder: SparseCoder,
    settings: CodingSettings,
    share: WorkShare = ALL_OF_IT,
) -> CodingFigures:
    """Write this process's shards of a store; resumes a stopped run.

    A process that finds no shard missing after its own work seals the store.

    Args:
        name: of the text, for the progress bar and errors.
        reader: the text.
        directory: folder of the store.
        meta: what the store says of its codes, see :func:`store_meta`.
        open_model: opens the model; called only if there is something to code.
        coder, settings, share: what is done with the hidden states, and by whom.

    Raises:
        ValueError: a store made with other settings exists, all codes of a shard are empty, or codes cannot be written
            (see :meth:`SplitCoder.coded_chunks`).
    """
    boundaries = shard_boundaries(reader, settings.shard_tokens)
    writer = CodeStoreWriter(directory, meta, boundaries, with_gaps=coder.has_gaps)
    figures = CodingFigures(writer.directory, writer.num_shards)
    missing = writer.missing_shards()
    figures.already_complete = not missing and writer.is_sealed
    own = [shard for shard in missing if share.owns(shard[0])]
    if own:
        if share.index == 0 and writer.num_shards < share.count:
            logger.warning(
                "%s: %d processes share %d shards, so that some have nothing to do; use a smaller --shard-tokens",
                *(name, share.count, writer.num_shards),
            )
        in_other_hands = sum(stop - start for _, start, stop in missing) - sum(stop - start for _, start, stop in own)
        split_coder = SplitCoder(name, reader, open_model(), coder, settings)
        _write_shards(split_coder, writer, own, figures, in_other_hands)
    figures.missing_shards = len(writer.missing_shards())
    if not figures.missing_shards:
        try:
            figures.meta = writer.finish()
        except MissingShardsError:  # another process without a share of its own writes one again
            figures.missing_shards = max(1, len(writer.missing_shards()))
    return figures


def shard_boundaries(reader: TokenBlocks, shard_tokens: int) -> list[int]:
    """Token offsets at which shards begin, then the end of the text: block starts, about ``shard_tokens`` apart.

    No block is in two shards, so that a shard depends only on its own blocks.
    """
    boundaries = [0]
    while boundaries[-1] + shard_tokens < reader.num_tokens:
        following = np.searchsorted(reader.starts, boundaries[-1] + shard_tokens)
        if following == len(reader.starts):
            break
        boundaries.append(int(reader.starts[following]))
    return [*boundaries, reader.num_tokens]


def store_meta(
    coder: SparseCoder, settings: CodingSettings, *, split: str, auxiliary: str, blocks: BlockSettings | None
) -> dict[str, Any]:
    """What ``plan.json`` and ``meta.json`` of a store say of its codes.

    Args:
        coder, settings: what makes the codes.
        split, auxiliary: fingerprints of the text and of the model.
        blocks: how the text was cut; None if it consists of blocks.
    """
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
        "fingerprints": {"split": split, "dictionary": coder.fingerprint, "auxiliary": auxiliary},
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
            counted, why_empty = 0, None
            for chunk in coder.coded_chunks(range(*np.searchsorted(coder.reader.starts, (start, stop)))):
                rows.add(chunk.positions - start, chunk.coded.codes, chunk.coded.gap)
                why_empty = why_empty or chunk.why_empty
                figures.empty_tokens += int((np.diff(chunk.coded.codes.indptr) == 0).sum())
                figures.inexact_tokens += chunk.inexact
                counted += len(chunk.positions)
                progress.update(len(chunk.positions))
            _check_not_all_empty(coder, rows, (start, stop), why_empty)
            writer.write_shard(index, rows)
            figures.coded_tokens += rows.coded_tokens
            remaining -= stop - start
            if number == 0:
                per_token = sum(array.nbytes for array in rows.arrays().values()) / (stop - start)
                warn_of_full_disk(writer.directory, per_token * (remaining + tokens_of_others))
            progress.update(stop - start - counted)  # tokens that are not coded count as done, too


def _check_not_all_empty(coder: SplitCoder, rows: ShardRows, span: tuple[int, int], why: str | None) -> None:
    whole_split = span == (0, coder.reader.num_tokens)
    if rows.nonzeros == 0 and rows.coded_tokens >= (1 if whole_split else TOKENS_TO_JUDGE_EMPTINESS):
        raise ValueError(
            f"{coder.split}: the codes of all {rows.coded_tokens} coded tokens from {span[0]} to {span[1] - 1} are "
            f"empty, since {why or 'all weights round to 0'}"
        )


@dataclass(frozen=True)
class CodingEstimate:
    """The cost of coding a split.

    Attributes:
        split: name of the split.
        num_tokens: tokens of the split, special symbols included.
        tokens_to_code: content tokens of the covered share; exact if the sample is the whole split.
        sampled_tokens: tokens coded for the sample.
        mean_nonzeros: mean number of non-zeros in a code of the sample.
        inexact_tokens: tokens of the sample whose codes do not reach the required accuracy.
        gap_mean, gap_max: mean and largest gap of the sample's codes; None for a coder without gaps.
        tokens_per_second: tokens that one process on this machine codes in a second.
        num_shards, num_processes: number of shards, and of processes that share them.
        seconds: time that the process with the most shards needs.
        disk_bytes: size of the finished store.
        memory_bytes: peak resident memory of a process.
        gpu_bytes: peak memory on the GPU; 0 without a GPU.
    """

    split: str
    num_tokens: int
    tokens_to_code: int
    sampled_tokens: int
    mean_nonzeros: float
    inexact_tokens: int
    gap_mean: float | None
    gap_max: float | None
    tokens_per_second: float
    num_shards: int
    num_processes: int
    seconds: float
    disk_bytes: int
    memory_bytes: int
    gpu_bytes: int

    def __str__(self) -> str:
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes like this one"
        gaps = "" if self.gap_mean is None else f", duality gap mean {self.gap_mean:.1e}, max {self.gap_max:.1e}"
        gpu = f", {self.gpu_bytes / 1e9:.2f} GB on the GPU" if self.gpu_bytes else ""
        return (
            f"{self.split}: {self.num_tokens} tokens, {self.tokens_to_code} to code, in {self.num_shards} shards\n"
            f"  sample: {self.sampled_tokens} tokens, {self.mean_nonzeros:.1f} non-zeros a token, "
            f"{self.tokens_per_second:.0f} tokens a second{gaps}\n"
            f"  time: {timedelta(seconds=math.ceil(self.seconds))} with {processes}\n"
            f"  disk: {self.disk_bytes / 1e6:.1f} MB\n"
            f"  memory: {self.memory_bytes / 1e9:.2f} GB a process{gpu}"
        )


def estimate_blocks(
    name: str,
    reader: TokenBlocks,
    encoder: TokenVectors,
    coder: SparseCoder,
    settings: CodingSettings,
    *,
    share: WorkShare = ALL_OF_IT,
) -> CodingEstimate:
    """Code evenly spread blocks of a text, and extrapolate; arguments are those of :class:`SplitCoder`.

    Raises:
        ValueError: a hidden state is NaN or infinite.
    """
    split_coder = SplitCoder(name, reader, encoder, coder, replace(settings, allow_inexact=True))
    sample = sampled_blocks(reader, settings)
    for _ in split_coder.coded_chunks(sample[:1]):  # warm up: compiling and loading happen once
        pass
    start = time.perf_counter()
    coded, nonzeros, inexact = 0, 0, 0
    gaps = [np.zeros(0)]
    for chunk in split_coder.coded_chunks(sample):
        coded += len(chunk.positions)
        nonzeros += chunk.coded.codes.nnz
        inexact += chunk.inexact
        if chunk.coded.gap is not None:
            gaps.append(chunk.coded.gap)
    rate = coded / (time.perf_counter() - start)

    gap = np.concatenate(gaps)
    share_coded = coded / int(reader.sizes[sample].sum())
    to_code = round(reader.num_tokens * share_coded)
    mean_nonzeros = nonzeros / max(1, coded)
    boundaries = shard_boundaries(reader, settings.shard_tokens)
    num_shards = len(boundaries) - 1
    largest_part = math.ceil(num_shards / share.count) / num_shards
    pair_bytes = atom_dtype(coder.num_atoms).itemsize + WEIGHT_DTYPE.itemsize
    longest_shard = max(stop - first for first, stop in pairwise(boundaries))
    shard_nonzeros = longest_shard * share_coded * mean_nonzeros
    return CodingEstimate(
        split=name,
        num_tokens=reader.num_tokens,
        tokens_to_code=to_code,
        sampled_tokens=coded,
        mean_nonzeros=mean_nonzeros,
        inexact_tokens=inexact,
        gap_mean=float(gap.mean()) if len(gap) else None,
        gap_max=float(gap.max()) if len(gap) else None,
        tokens_per_second=rate,
        num_shards=num_shards,
        num_processes=share.count,
        seconds=largest_part * to_code / rate if coded else 0.0,
        disk_bytes=round(to_code * mean_nonzeros * pair_bytes) + reader.num_tokens * INDPTR_DTYPE.itemsize,
        # a shard's codes are in memory twice when they are joined; row counts and pointers take 8 bytes each
        memory_bytes=peak_memory() + round(2 * shard_nonzeros * pair_bytes) + 2 * 8 * longest_shard,
        gpu_bytes=torch.cuda.max_memory_allocated(encoder.device) if encoder.device.type == "cuda" else 0,
    )


def sampled_blocks(reader: TokenBlocks, settings: CodingSettings) -> np.ndarray:
    """Numbers ``(n,)``, ascending, of evenly spread blocks with a few thousand tokens to code, or of all blocks."""
    text = min(
        max(SAMPLE_TOKENS, settings.batch_tokens) / settings.coverage, max(MAX_SAMPLE_TEXT, settings.batch_tokens)
    )
    count = min(len(reader), math.ceil(text * len(reader) / reader.num_tokens))
    return np.unique(np.linspace(0, len(reader) - 1, count).round().astype(np.int64))


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
