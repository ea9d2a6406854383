"""Estimates the disk, time and memory that coding a split needs, by coding a small sample; writes nothing."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise

import numpy as np
import torch

from mlsm_plugin.auxiliary.block_coding import shard_boundaries
from mlsm_plugin.auxiliary.split_coder import CodingSettings, SplitCoder
from mlsm_plugin.files.work_share import ALL_OF_IT, WorkShare
from mlsm_plugin.hidden_states.blocks import TokenBlocks
from mlsm_plugin.hidden_states.encoder import TokenVectors
from mlsm_plugin.sparse_coding.code_store import INDPTR_DTYPE, WEIGHT_DTYPE, atom_dtype
from mlsm_plugin.sparse_coding.coder import SparseCoder

# Tokens of the sample to code; never less than a batch, so that the memory of a batch is measured.
SAMPLE_TOKENS = 4096
# Largest number of tokens of text in the sample, or a batch if that is more; it limits the sample at low coverage.
MAX_SAMPLE_TEXT = 1 << 16


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
