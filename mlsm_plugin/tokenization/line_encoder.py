"""Convert lines to fairseq ids, in one or several processes, always in the order of the text."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np

BATCH_CHARACTERS = 1 << 18


@dataclass
class EncodedBatch:
    """The sentences of a batch of consecutive lines."""

    ids: np.ndarray
    """fairseq ids, shape (n_tokens,); each sentence and each document boundary ends in ``</s>``."""
    lengths: np.ndarray
    """Number of tokens of each sentence, shape (n_sentences,); 1 for a document boundary (``</s>`` alone)."""
    boundary_before: bool
    """Whether a blank line comes before the first sentence."""
    boundary_after: bool
    """Whether a blank line comes after the last sentence."""
    unknown: int
    """Number of ``<unk>`` tokens."""
    dropped: int
    """Number of lines with characters but without tokens, such as a zero-width space."""
    unknown_characters: Counter[str] = field(default_factory=Counter)
    """Number of times that each character was part of an ``<unk>``."""


class LineEncoder(ABC):
    """Converts lines to fairseq's ids, with the document boundaries between them.

    Attributes:
        unknown_piece: the tokenizer's id for unknown text.
        end_piece: index of ``</s>`` in the table; not an id of the tokenizer.
        table: fairseq's id for each id of the tokenizer, ``(end_piece + 1,)``.
    """

    unknown_piece: int
    end_piece: int
    table: np.ndarray

    @abstractmethod
    def pieces_of(self, line: str, unknown_characters: Counter[str]) -> list[int]:
        """The tokenizer's ids of a line; adds the characters of unknown pieces to ``unknown_characters``."""

    def encode_batch(self, lines: list[str]) -> EncodedBatch:
        """Encode lines. Blank lines between two sentences become one document boundary."""
        pieces: list[int] = []
        lengths: list[int] = []
        characters: Counter[str] = Counter()
        unknown = dropped = 0
        boundary_before = pending = False
        for line in lines:
            if not line:
                pending = True
                continue
            sentence = self.pieces_of(line, characters)
            unknown += sentence.count(self.unknown_piece)
            if not sentence:
                dropped += 1
                continue
            if pending and lengths:
                pieces.append(self.end_piece)
                lengths.append(1)
            elif pending:
                boundary_before = True
            pending = False
            pieces += sentence
            pieces.append(self.end_piece)
            lengths.append(len(sentence) + 1)
        return EncodedBatch(
            ids=self.table[np.array(pieces, dtype=np.int64)],
            lengths=np.array(lengths, dtype=np.int64),
            boundary_before=boundary_before,
            boundary_after=pending,
            unknown=unknown,
            dropped=dropped,
            unknown_characters=characters,
        )


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
    """Encode lines with ``workers`` processes; the result does not depend on their number.

    Args:
        encoder: encodes a batch.
        lines: the text, read only as fast as it is encoded.
        workers: number of processes; 1 means this process.

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
