"""Endless shuffled batches of hidden states, with only one buffer in memory."""

import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import count as counting

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.hidden_states.blocks import TokenBlocks, hidden_states_of
from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.core.machine.devices import Device

BUFFER_ROWS = 1 << 16  # hidden states that are shuffled together: 100 MB with 384 dimensions
BLOCKS_AT_ONCE = 64


class HiddenStateStream:
    """Batches of hidden states of a split, in random order, pass after pass.

    Each pass reads the blocks in another random order and fills a buffer with the hidden states of as many as fit. The
    rows of a full buffer are shuffled and cut into batches; rows that do not fill a batch are left out until the next
    pass. Everything depends only on the seed and the number of the batch, so a stream can begin anywhere: skipped
    buffers cost no forward pass. While the batches of a buffer are used, a thread fills the next buffer.

    A batch has ``batch_size`` rows, or all rows of the split if it has fewer. A buffer has at least ``buffer_rows``,
    except the last of a pass. A forward pass has at most ``max_batch_tokens`` tokens.
    """

    def __init__(
        self,
        reader: TokenBlocks,
        encoder: HiddenStateEncoder,
        *,
        batch_size: int,
        max_batch_tokens: int,
        seed: int = 1,
        buffer_rows: int = BUFFER_ROWS,
    ) -> None:
        self.reader = reader
        self.encoder = encoder
        self.batch_size = batch_size
        self.seed = seed
        self.max_batch_tokens = max_batch_tokens
        self.buffer_rows = max(buffer_rows, batch_size)

    def batches(self, skip: int = 0, stop: int = sys.maxsize) -> Generator[Tensor, None, None]:
        """Batches ``(batch_size, dim)`` float32 on the encoder's device, from number ``skip`` to before ``stop``.

        Close the iterator if you do not exhaust it; its thread then ends after the current forward pass. ValueError if
        the text holds only special tokens.
        """
        closed = threading.Event()
        shuffled = self._shuffled(skip, stop, closed)
        with ThreadPoolExecutor(1, "hidden states") as thread:
            try:
                next_buffer = thread.submit(next, shuffled, None)
                while (buffer := next_buffer.result()) is not None:
                    rows, batches = buffer
                    next_buffer = thread.submit(next, shuffled, None)
                    for batch in batches:
                        # where tokens lack a hidden state there are fewer rows; the first ones are repeated
                        yield rows[batch.remainder(len(rows)).to(rows.device)]
            finally:
                closed.set()

    def _shuffled(self, skip: int, stop: int, closed: threading.Event) -> Iterator[tuple[Tensor, Tensor]]:
        """The hidden states of each buffer, and the rows of each of its batches, ``(n_batches, size)``."""
        for epoch in counting():
            for number, (blocks, rows) in enumerate(self._buffers(epoch, self.buffer_rows)):
                if stop <= 0:
                    return
                size = min(self.batch_size, rows) if number == 0 else self.batch_size
                count = rows // size
                if skip < count:
                    order = np.random.default_rng([self.seed, epoch, number]).permutation(rows)
                    batches = torch.from_numpy(order[: count * size]).view(count, size)
                    yield self._hidden_states(blocks, rows, closed), batches[max(0, skip) : stop]
                skip = skip - count
                stop = stop - count

    def sample(self, most: int, *, device: Device = None) -> Tensor:
        """At most ``most`` hidden states ``(n, dim)`` float32 of random blocks; ``device`` None: the encoder's."""
        blocks, rows = next(self._buffers(0, most))
        return self._hidden_states(blocks, rows, device=device)[:most]

    def _buffers(self, epoch: int, buffer_rows: int) -> Iterator[tuple[list[int], int]]:
        """The blocks of each buffer of a pass, and their number of rows."""
        blocks: list[int] = []
        rows = 0
        none_yet = True
        for index in np.random.default_rng([self.seed, epoch]).permutation(len(self.reader)).tolist():
            blocks.append(index)
            rows += sum(int(self.reader.content_mask(piece.tokens).sum()) for piece in self.reader.block(index))
            if rows >= buffer_rows:
                yield blocks, rows
                blocks = []
                rows = 0
                none_yet = False
        if rows and (none_yet or rows >= self.batch_size):
            yield blocks, rows
        elif none_yet:
            raise ValueError("the text has only special tokens, so nothing can be learned from it")

    def _hidden_states(
        self, blocks: list[int], number: int, closed: threading.Event | None = None, device: Device = None
    ) -> Tensor:
        """The hidden states of blocks, of at most ``number`` tokens, in text order within every few blocks.

        Stops when ``closed``. ValueError if no token has one.
        """

        def keep(tokens: Tensor, _: Tensor) -> Tensor:
            if closed is not None and closed.is_set():
                raise CancelledError
            return self.reader.content_mask(tokens)

        rows = torch.empty(number, self.encoder.dim, device=device or self.encoder.device)
        filled = 0
        with Progress(
            total=number, desc="hidden states", unit="token", unit_scale=True, disable=closed is not None
        ) as progress:
            for first in range(0, len(blocks), BLOCKS_AT_ONCE):
                chosen = blocks[first : first + BLOCKS_AT_ONCE]
                pieces = [piece for index in chosen for piece in self.reader.block(index)]
                _, hidden = hidden_states_of(
                    pieces, self.reader, self.encoder, max_tokens=self.max_batch_tokens, keep=keep
                )
                rows[filled : filled + len(hidden)] = hidden
                filled += len(hidden)
                progress.update(len(hidden))
        if not filled:
            raise ValueError("the model knows none of the characters of the text, so nothing can be learned from it")
        return rows[:filled]
