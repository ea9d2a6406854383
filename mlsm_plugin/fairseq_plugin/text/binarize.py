"""Convert raw text to the dataset that fairseq tasks load: ``dict.txt``, ``<split>.bin`` and ``<split>.idx``."""

import multiprocessing
import os
import shutil
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory, write_json
from mlsm_plugin.core.files.model_files import FOLDER_NAME, MODEL_NAME, SUMMARY_NAME
from mlsm_plugin.core.files.output_lock import PARENT, end_with_parent
from mlsm_plugin.core.text.shared_text import warn_of_shared_files
from mlsm_plugin.core.text.text_files import check_text_files, progress_bar, read_text
from mlsm_plugin.core.text.unknown_tokens import DEFAULT_MAX_UNK_RATE, KnownText, UnknownTokens
from mlsm_plugin.fairseq_plugin.compat.binarized_files import StreamingMMapBuilder
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import EncodedBatch, TextTokenizer, open_tokenizer

BATCH_CHARACTERS = 1 << 18  # characters that are encoded at once
SPLITS = ("train", "valid", "test")
TRAIN_ANOTHER = (
    "train the tokenizer on text like this, or with a higher --character-coverage of `mlsm tokenizer`; to keep the "
    "text as it is, raise --max-unk-rate of `mlsm binarize`"
)


@dataclass
class SplitFigures:
    """The counts of one split."""

    sentences: int = 0  # lines with text
    documents: int = 0  # blank lines and the ends of files separate them
    tokens: int = 0  # tokens in the .bin file, with a </s> after each sentence and between two documents
    unknown: int = 0  # <unk> tokens
    dropped: int = 0  # lines left out because normalization leaves nothing of them, such as a zero-width space
    unk_rate: float = 0.0  # unknown share of the text: of tokens or of characters, whichever is larger


@dataclass(frozen=True)
class BinarizeFigures:
    """The result of ``binarize``."""

    output: Path  # the data folder
    tokenizer_sha256: str  # for SentencePiece, of the model file
    dictionary_symbols: int  # length of fairseq's ``Dictionary`` (a task adds ``<mask>``)
    splits: dict[str, SplitFigures] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """The content of ``binarize.json``. It only holds figures, so equal data gives equal files."""
        splits = {
            name: {**vars(figures), "unk_rate": round(figures.unk_rate, 8)} for name, figures in self.splits.items()
        }
        return {
            "tokenizer_sha256": self.tokenizer_sha256,
            "dictionary_symbols": self.dictionary_symbols,
            "splits": splits,
        }

    def table(self) -> str:
        """A readable table: a header and a line for each split."""
        rows = [("split", "documents", "sentences", "tokens", "unk rate", "dropped")]
        for name, figures in self.splits.items():
            counts = (f"{figures.documents:,}", f"{figures.sentences:,}", f"{figures.tokens:,}")
            rows.append((name, *counts, f"{figures.unk_rate:.4%}", f"{figures.dropped:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        )


def binarize(
    *,
    tokenizer: PathLike,
    train: Sequence[PathLike],
    valid: Sequence[PathLike],
    test: Sequence[PathLike] = (),
    output: PathLike,
    workers: int = 1,
    max_unk_rate: float = DEFAULT_MAX_UNK_RATE,
) -> BinarizeFigures:
    """Encode text files and write fairseq's memory-mapped datasets, with the tokenizer and its dictionary next to them.

    A line is a sentence and ends in ``</s>``. A run of blank lines, or the end of a file, is a document boundary: a
    sentence of ``</s>`` alone, which ``--sample-break-mode complete_doc`` looks for. The text is streamed, and the
    files do not depend on ``workers``, the number of processes that encode.

    Args:
        tokenizer: folder written by ``mlsm tokenizer``, or ``hf:`` followed by a folder or hub name of Hugging Face.
        train, valid, test: text files of the splits, plain or compressed.
        output: the data folder. It only changes if all splits succeed; splits of an earlier run are then replaced.
        max_unk_rate: largest share of the tokens and characters of a split that may be unknown; above it, nothing is
            written.

    Raises:
        ValueError: text, tokenizer or options are invalid, or too many tokens are unknown.
        OSError: a file cannot be read or written.
    """
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    KnownText(max_unk_rate=max_unk_rate)  # raises if it is not a share
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} exists and is not a folder; choose another name")
    inputs = {split: paths for split, paths in zip(SPLITS, (train, valid, test), strict=True) if paths}
    for split in ("train", "valid"):
        if split not in inputs:
            raise ValueError(f"no text file was given for the {split} split")
    sizes = {split: check_text_files(paths) for split, paths in inputs.items()}
    warn_of_shared_files(train, valid, test)
    opened = open_tokenizer(tokenizer)
    figures = BinarizeFigures(output, opened.fingerprint, len(opened.dictionary))
    with atomic_directory(output) as folder:
        for split, paths in inputs.items():
            builder = StreamingMMapBuilder(str(folder / f"{split}.bin"), len(opened.dictionary))
            with progress_bar(split, sizes[split]) as bar:
                batches = encode_in_order(opened, read_text(paths, bar.update), workers)
                figures.splits[split] = _write_split(split, batches, builder, opened.dictionary.eos(), max_unk_rate)
            builder.finalize(str(folder / f"{split}.idx"))
        opened.write_to(folder)
        # The new files are renamed next, in the order of their names. Delete the old files first, since an old .idx
        # must never be next to a new .bin.
        remove_earlier_run(output)
    write_json(output / SUMMARY_NAME, figures.as_json())
    return figures


def remove_earlier_run(output: Path) -> None:
    """Remove the files of an earlier run; a task would read its splits with the new dictionary."""
    shutil.rmtree(output / FOLDER_NAME, ignore_errors=True)
    for name in (SUMMARY_NAME, MODEL_NAME, *(f"{split}{end}" for end in (".idx", ".bin") for split in SPLITS)):
        (output / name).unlink(missing_ok=True)


def _write_split(
    split: str, batches: Iterator[EncodedBatch], builder: StreamingMMapBuilder, end: int, max_unk_rate: float
) -> SplitFigures:
    """Append the batches, with the document boundaries between them; ValueError if the split has no tokens."""
    figures = SplitFigures()
    unknown = UnknownTokens()
    pending = False
    for batch in batches:
        unknown += batch.unknown
        figures.dropped += batch.dropped
        pending = pending or batch.boundary_before
        if len(batch.lengths):
            if pending and figures.sentences:
                _count_and_add(figures, builder, np.array([end]), np.array([1]))
            _count_and_add(figures, builder, batch.ids, batch.lengths)
            pending = False
        pending = pending or batch.boundary_after
    if not figures.sentences:
        raise ValueError(f"the {split} split has no tokens after normalization; check its text files")
    figures.documents += 1
    figures.unknown = unknown.unknown
    figures.unk_rate = unknown.rate
    unknown.check(f"the {split} split", max_unk_rate, remedy=TRAIN_ANOTHER)
    return figures


def _count_and_add(figures: SplitFigures, builder: StreamingMMapBuilder, ids: np.ndarray, lengths: np.ndarray) -> None:
    boundaries = int((lengths == 1).sum())  # a sentence has at least one token before its </s>
    figures.documents += boundaries
    figures.sentences += len(lengths) - boundaries
    figures.tokens += len(ids)
    builder.add_sentences(ids, lengths)


def make_batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """Group lines into lists of about ``BATCH_CHARACTERS`` characters."""
    batch: list[str] = []
    characters = 0
    for line in lines:
        batch.append(line)
        characters += len(line) + 1
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def encode_in_order(tokenizer: TextTokenizer, lines: Iterable[str], workers: int) -> Iterator[EncodedBatch]:
    """Encode lines in order, with ``workers`` processes (1: this process); lines are only read as fast as needed.

    OSError if a worker process was killed, for example because memory ran out.
    """
    batches = make_batches(lines)
    if workers == 1:
        yield from map(tokenizer.encode_batch, batches)
        return
    futures: deque[Future[EncodedBatch]] = deque()
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(tokenizer, os.getpid()),
    ) as pool:
        try:
            for batch in batches:
                futures.append(pool.submit(_encode_in_worker, batch))
                if len(futures) > 2 * workers:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        except BrokenProcessPool:
            raise OSError("a worker process was killed, perhaps because memory ran out; use fewer --workers") from None
        finally:
            for future in futures:
                future.cancel()


_worker_tokenizer: TextTokenizer | None = None  # set in worker processes only


def _start_worker(tokenizer: TextTokenizer, parent: int) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    os.environ[PARENT] = str(parent)  # it may be dead by now
    end_with_parent()  # otherwise it would wait for work forever


def _encode_in_worker(lines: list[str]) -> EncodedBatch:
    assert _worker_tokenizer is not None
    return _worker_tokenizer.encode_batch(lines)
