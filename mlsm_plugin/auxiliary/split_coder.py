"""Turns blocks of a text into the codes of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.hidden_states.blocks import BlockSettings, TokenBlocks, chunks_of, hidden_states_of
from mlsm_plugin.hidden_states.encoder import TokenVectors
from mlsm_plugin.sparse_coding.coder import SparseCoder, SparseCodes
from mlsm_plugin.sparse_coding.encode import first_nonfinite_row
from mlsm_plugin.sparse_coding.stored_codes import check_top, covered_positions, strongest, without_negative_codes


@dataclass(frozen=True)
class CodingSettings:
    """The settings that, together with the coder, decide the codes of a split; and how the work is divided.

    Attributes:
        layer: which hidden state of the auxiliary model is coded.
        blocks: what the auxiliary model sees at once.
        threads: CPU threads of the coder, None for all cores.
        allow_inexact: also write codes that do not reach the required accuracy.
        coverage, coverage_seed: the share of positions that is coded, see :func:`covered_positions`.
        fp16: run the auxiliary model in half precision.
        batch_tokens: tokens in one forward pass and in one call of the coder; limits the memory.
        shard_tokens: tokens in a shard, the unit in which work is resumed and shared.
        latent_top: how many atoms of each code are kept, those with the largest weights; None: all.

    Raises:
        ValueError: ``latent_top`` is less than 1.
    """

    layer: int
    blocks: BlockSettings = field(default_factory=BlockSettings)
    threads: int | None = None
    allow_inexact: bool = False
    coverage: float = 1.0
    coverage_seed: int = 1
    fp16: bool = False
    batch_tokens: int = 8192
    shard_tokens: int = 1 << 18
    latent_top: int | None = None

    def __post_init__(self) -> None:
        check_top(self.latent_top)


@dataclass(frozen=True)
class CodedChunk:
    """The codes of some tokens of a split.

    Attributes:
        positions: ``(n,)`` flat positions, ascending.
        coded: codes ``(n, n_atoms)`` and, where the coder has them, gaps ``(n,)``.
        inexact: how many of the codes do not reach the required accuracy.
        why_empty: the coder's explanation if all codes are empty, else None.
    """

    positions: np.ndarray
    coded: SparseCodes
    inexact: int
    why_empty: str | None


@dataclass(frozen=True)
class SplitCoder:
    """A text, with its name, and the model and the coder that code it."""

    split: str
    reader: TokenBlocks
    encoder: TokenVectors
    coder: SparseCoder
    settings: CodingSettings

    def coded_chunks(self, block_indices: Iterable[int]) -> Iterator[CodedChunk]:
        """The codes of the wanted tokens of some blocks, about ``batch_tokens`` tokens of text at a time.

        Raises:
            ValueError: a hidden state is NaN or infinite (the message gives its position), or codes do not reach the
                required accuracy and ``allow_inexact`` is off.
        """
        settings = self.settings
        pieces = (piece for index in block_indices for piece in self.reader.block(int(index)))
        wanted = (piece for piece in pieces if self._wanted(piece.tokens, piece.positions).any())
        for blocks in chunks_of(wanted, settings.batch_tokens):
            positions, hidden = hidden_states_of(
                blocks, self.reader, self.encoder, max_tokens=settings.batch_tokens, keep=self._wanted
            )
            self._check_finite(positions, hidden)
            coded = self.coder.encode(hidden, threads=settings.threads)  # on the device of the model
            inexact = self._count_inexact(positions, coded)
            codes = without_negative_codes(coded.codes)
            why_empty = self.coder.why_empty(hidden) if len(positions) and codes.nnz == 0 else None
            kept = replace(coded, codes=strongest(codes, settings.latent_top))
            yield CodedChunk(positions, kept, inexact, why_empty)

    def _wanted(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Which tokens are coded (bool, any shape): content tokens at covered positions."""
        covered = covered_positions(
            positions.numpy(), coverage=self.settings.coverage, seed=self.settings.coverage_seed
        )
        return self.reader.content_mask(tokens) & torch.from_numpy(covered)

    def _check_finite(self, positions: np.ndarray, hidden: Tensor) -> None:
        row = first_nonfinite_row(hidden)
        if row is not None:
            cause = "try without --fp16" if self.settings.fp16 else "the auxiliary model is broken"
            raise ValueError(
                f"{self.split}: the hidden state of the token at position {positions[row]} in layer "
                f"{self.settings.layer} holds NaN or infinity; {cause}"
            )

    def _count_inexact(self, positions: np.ndarray, coded: SparseCodes) -> int:
        """How many codes are inexact; raises ValueError if inexact codes are not allowed."""
        inexact = self.coder.inexact(coded)
        if inexact is None:
            return 0
        if not self.settings.allow_inexact:
            raise ValueError(
                f"{self.split}: {len(inexact.rows)} of the {len(positions)} codes of tokens {positions[0]} to "
                f"{positions[-1]}, the first at position {positions[inexact.rows[0]]}, {inexact.reason}, or "
                "--allow-inexact to write them as they are. They are not written; finished shards are kept"
            )
        return len(inexact.rows)
