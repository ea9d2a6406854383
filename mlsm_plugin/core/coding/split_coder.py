"""Turn blocks of a text into the codes of their tokens."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.files.settings import option, seed
from mlsm_plugin.core.hidden_states.blocks import Block, TokenBlocks, chunks_of, hidden_states_of
from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.core.hidden_states.settings import BlockSettings, ModelRun, layer
from mlsm_plugin.core.sparse_coding.coder import SparseCoder, SparseCodes
from mlsm_plugin.core.sparse_coding.encode import first_nonfinite_row
from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions, strongest, without_negative_codes

CHUNKS_AT_ONCE = 4  # at most; each takes the memory of a forward pass of batch_tokens


@dataclass(frozen=True)
class CodingSettings(ModelRun):
    """How a split is coded, and how the work is divided. The auxiliary model sees one of ``blocks`` at a time.

    ValueError if a value is out of range.
    """

    layer: int = layer()
    blocks: BlockSettings = field(default_factory=BlockSettings)
    coverage: float = option(
        1.0,
        above=0,
        most=1,
        help="share of the positions to code, drawn with --seed; training masks only coded positions",
    )
    coverage_seed: int = seed("of --coverage", flag="--seed")
    latent_top: int | None = option(None, least=1, help="keep the N strongest atoms of each code")
    allow_inexact: bool = option(
        False, help="also write codes that do not reach the required accuracy (--tolerance), with a warning"
    )
    shard_tokens: int = option(
        1 << 18, least=1, help="tokens in a shard, the unit in which work is resumed and shared; limits the memory"
    )

    @classmethod
    def with_run(
        cls, run: ModelRun, layer: int, *, blocks: BlockSettings | None = None, latent_top: int | None = None
    ) -> "CodingSettings":
        """Settings for a model that runs as in ``run``, such as in the run that learned its dictionary."""
        return cls(
            layer,
            blocks or BlockSettings(),
            latent_top=latent_top,
            device=run.device,
            fp16=run.fp16,
            threads=run.threads,
            batch_tokens=run.batch_tokens,
        )


@dataclass(frozen=True)
class CodedChunk:
    """The codes ``(n, n_atoms)`` of tokens of a split, at ascending flat positions ``(n,)``.

    ``inexact`` codes do not reach the required accuracy; if all are empty, ``why_empty`` is the coder's explanation.
    """

    positions: np.ndarray
    coded: SparseCodes
    inexact: int
    why_empty: str | None


@dataclass(frozen=True)
class SplitCoder:
    """A text with its name, and the model and the coder that code it."""

    split: str
    reader: TokenBlocks
    encoder: HiddenStateEncoder
    coder: SparseCoder
    settings: CodingSettings

    def coded_chunks(self, block_indices: Iterable[int]) -> Iterator[CodedChunk]:
        """Code the covered tokens of some blocks in order, about ``batch_tokens`` tokens of text at a time.

        On a CPU up to ``CHUNKS_AT_ONCE`` chunks are coded in parallel, each with an equal share of the threads: the
        model runs on one chunk while another is read or solved. Only the coder's matrix products use all threads.
        ValueError if a hidden state is NaN or infinite, or codes are inexact and ``allow_inexact`` is off.
        """
        pieces = (piece for index in block_indices for piece in self.reader.block(int(index)))
        pieces_to_code = (piece for piece in pieces if self._is_coded(piece.tokens, piece.positions).any())
        threads = self.settings.threads or torch.get_num_threads()
        most = CHUNKS_AT_ONCE if self.encoder.device.type == "cpu" else 1
        workers = next(n for n in range(most, 0, -1) if threads % n == 0)
        share = threads // workers
        futures: deque[Future[CodedChunk]] = deque()
        with torch_threads(share), ThreadPoolExecutor(workers, "coding", _take_threads, (share,)) as pool:
            try:
                for blocks in chunks_of(pieces_to_code, self.settings.batch_tokens):
                    futures.append(pool.submit(self._coded, blocks, threads, share))
                    if len(futures) == 2 * workers:
                        yield futures.popleft().result()
                while futures:
                    yield futures.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _coded(self, blocks: list[Block], threads: int, share: int) -> CodedChunk:
        """Code the covered tokens of ``blocks`` with ``share`` of the ``threads``."""
        positions, hidden = hidden_states_of(
            blocks, self.reader, self.encoder, max_tokens=self.settings.batch_tokens, keep=self._is_coded
        )
        self._check_finite(positions, hidden)
        with torch_threads(threads):  # the last bits of float32 products depend on it
            coded = self.coder.encode(hidden, threads=share)  # on the device of the model
        inexact = self._count_inexact(positions, coded)
        codes = without_negative_codes(coded.codes)
        why_empty = self.coder.why_empty(hidden) if len(positions) and codes.nnz == 0 else None
        kept = replace(coded, codes=strongest(codes, self.settings.latent_top))
        return CodedChunk(positions, kept, inexact, why_empty)

    def _is_coded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Which tokens are coded (bool, any shape): content tokens at covered positions."""
        coverage = self.settings.coverage
        seed = self.settings.coverage_seed
        covered = covered_positions(positions.numpy(), coverage=coverage, seed=seed)
        return self.reader.content_mask(tokens) & torch.from_numpy(covered)

    def _check_finite(self, positions: np.ndarray, hidden: Tensor) -> None:
        row = first_nonfinite_row(hidden)
        if row is not None:
            cause = "try it in float32, without --fp16" if self.settings.fp16 else "the auxiliary model is broken"
            raise ValueError(
                f"{self.split}: the hidden state of the token at position {positions[row]} in layer "
                f"{self.settings.layer} holds NaN or infinity; {cause}"
            )

    def _count_inexact(self, positions: np.ndarray, coded: SparseCodes) -> int:
        """The number of inexact codes; raises ValueError if inexact codes are not allowed."""
        inexact = self.coder.inexact(coded)
        if inexact is None:
            return 0
        if not self.settings.allow_inexact:
            raise ValueError(
                f"{self.split}: {len(inexact.rows)} of the {len(positions)} codes of tokens {positions[0]} to "
                f"{positions[-1]}, the first at position {positions[inexact.rows[0]]}, {inexact.reason}, or "
                "--allow-inexact of `mlsm encode` to write them as they are. They are not written; finished shards are "
                "kept"
            )
        return len(inexact.rows)


def _take_threads(number: int) -> None:
    """Let torch use ``number`` threads in this new thread."""
    torch.get_num_threads()  # the first call in a thread adopts the number that another thread set last
    torch.set_num_threads(number)
