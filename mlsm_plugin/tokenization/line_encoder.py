"""Convert lines to fairseq ids, in one or several processes, always in the order of the text."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from mlsm_plugin.tokenization.unknown_tokens import UnknownTokens

BATCH_CHARACTERS = 1 << 18


@dataclass
class EncodedBatch:
    """The sentences of a batch of consecutive lines.

    Attributes:
        ids: fairseq's ids ``(n_tokens,)``; each sentence and each document boundary ends in ``</s>``.
        lengths: tokens of each sentence ``(n_sentences,)``; 1 for a document boundary (``</s>`` alone).
        boundary_before, boundary_after: whether a blank line comes before the first sentence, or after the last one.
        dropped: number of lines with characters but without tokens, such as a zero-width space.
        unknown: the unknown tokens of the text, without ``</s>``.
    """

    ids: np.ndarray
    lengths: np.ndarray
    boundary_before: bool
    boundary_after: bool
    dropped: int
    unknown: UnknownTokens


class LineEncoder(ABC):
    """Converts lines to fairseq's ids, with the document boundaries between them.

    Attributes:
        end_piece: index of ``</s>`` in the table; not an id of the tokenizer.
        table: fairseq's id for each id of the tokenizer, ``(end_piece + 1,)``.
    """

    end_piece: int
    table: np.ndarray

    @abstractmethod
    def pieces_of(self, line: str, unknown: UnknownTokens) -> list[int]:
        """The tokenizer's ids of a line, which are counted in ``unknown``."""

    def encode_batch(self, lines: list[str]) -> EncodedBatch:
        """Encode lines. Blank lines between two sentences become one document boundary."""
        pieces: list[int] = []
        lengths: list[int] = []
        unknown = UnknownTokens()
        dropped = 0
        boundary_before = pending = False
        for line in lines:
            if not line:
                pending = True
                continue
            sentence = self.pieces_of(line, unknown)
            if not sentence:
                dropped += 1
                continue
            if pending and lengths:
                pieces.append(self.end_piece)
                lengths.append(1)
            elif pending:
                boundary_before = True
            pending = False
            pieces += [*sentence, self.end_piece]
            lengths.append(len(sentence) + 1)
        ids = self.table[np.array(pieces, dtype=np.int64)]
        return EncodedBatch(ids, np.array(lengths, dtype=np.int64), boundary_before, pending, dropped, unknown)


def make_batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """Group lines into lists of about ``BATCH_CHARACTERS`` characters."""
    batch: list[str] = []
    characters = 0
    for line in lines:
        batch.append(line)
        characters += len(line) + 1
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_in_order(encoder: LineEncoder, lines: Iterable[str], workers: int) -> Iterator[EncodedBatch]:
    """Encode lines, read only as fast as that goes, with ``workers`` processes (1: this one), always in their order.

    Raises:
        OSError: a worker process was killed, for example because memory ran out.
    """
    batches = make_batches(lines)
    if workers == 1:
        yield from map(encoder.encode_batch, batches)
        return
    waiting: deque[Future[EncodedBatch]] = deque()
    with ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("fork"), initializer=_start_worker, initargs=(encoder,)
    ) as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode_in_worker, batch))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise OSError("a worker process was killed, perhaps because memory ran out; use fewer --workers") from None
        finally:
            for future in waiting:
                future.cancel()


_worker_encoder: LineEncoder | None = None  # set in worker processes only


def _start_worker(encoder: LineEncoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent ends; otherwise it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(lines: list[str]) -> EncodedBatch:
    assert _worker_encoder is not None
    return _worker_encoder.encode_batch(lines)
