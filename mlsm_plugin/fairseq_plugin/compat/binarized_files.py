"""Check the files of a binarized split before fairseq maps them; with a wrong index it would read other memory."""

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from fairseq.data import FairseqDataset, TokenBlockDataset, indexed_dataset
from fairseq.data.indexed_dataset import IndexedDataset, MMapIndexedDataset, best_fitting_int_dtype

from mlsm_plugin.core.files.atomic_files import PathLike

MAGIC = MMapIndexedDataset.Index._HDR_MAGIC
OLD_MAGIC = IndexedDataset._HDR_MAGIC  # not mapped; fairseq checks what it reads
HEADER = struct.Struct("<QBQ")  # version, code of the type, number of sentences
AT_A_TIME = 1 << 24
POINTERS_AT_A_TIME = 1 << 14


def check_splits(path: PathLike, num_symbols: int, *, combine: bool = False) -> None:
    """Check the split at ``path`` (``DATA_BIN/train``), and with ``combine`` also ``train1``, ``train2``, ...

    Splits that do not exist are not checked. OSError if a file cannot be read; ValueError if the index or the data are
    damaged, or hold symbols that are not in the dictionary of ``num_symbols``.
    """
    for split in combined_splits(os.fspath(path)) if combine else [os.fspath(path)]:
        index = Path(f"{split}.idx")
        if index.is_file() and (problem := _problem(index, Path(f"{split}.bin"), num_symbols)):
            raise ValueError(f"{problem}; write it again with `mlsm binarize`")


def _problem(index: Path, data: Path, num_symbols: int) -> str | None:
    """The problem with the two files, or None."""
    size = index.stat().st_size
    with open(index, "rb") as file:
        if file.read(len(OLD_MAGIC)) == OLD_MAGIC:
            return None
        file.seek(0)
        magic = file.read(len(MAGIC))
        header = file.read(HEADER.size)
        offset = file.tell()
    if magic != MAGIC or len(header) < HEADER.size:
        return f"{index} is not an index of a binarized split"
    version, code, sentences = HEADER.unpack(header)
    kind = indexed_dataset._code_to_dtype.get(code)
    if version != 1 or kind is None or np.dtype(kind).kind not in "iu":
        return f"{index} is of another version, or its data are not whole numbers"
    if size != offset + sentences * 12:
        return f"{index} has {size} bytes, which does not fit its {sentences} sentences"
    if not data.is_file():
        return f"{data} does not exist"
    width = np.dtype(kind).itemsize
    address = 0
    for start, stop in _chunks(sentences):
        lengths = _mapped(index, np.int32, offset + 4 * start, stop - start).astype(np.int64)
        places = _mapped(index, np.int64, offset + 4 * sentences + 8 * start, stop - start)
        if lengths.min() < 0:
            return f"{index} has a sentence of {lengths.min()} tokens"
        ends = address + np.cumsum(lengths) * width
        if not np.array_equal(places, ends - lengths * width):
            return f"{index} has sentences at places that do not follow each other"
        address = int(ends[-1])
    if data.stat().st_size != address:
        return f"{data} has {data.stat().st_size} bytes, and its index needs {address}"
    for start, stop in _chunks(address // width):
        ids = _mapped(data, kind, width * start, stop - start)
        wrong = ids.max() if ids.max() >= num_symbols else ids.min()
        if not 0 <= wrong < num_symbols:
            return f"{data} holds the symbol {wrong}, and the dictionary has {num_symbols} symbols"
    return None


def _chunks(number: int) -> Iterator[tuple[int, int]]:
    for start in range(0, number, AT_A_TIME):
        yield start, min(number, start + AT_A_TIME)


def _mapped(path: Path, kind: type, offset: int, count: int) -> np.ndarray:
    return np.memmap(path, kind, "r", offset, (count,))


class StreamingMMapBuilder:
    """Writes the same bytes as ``indexed_dataset.make_builder(out_file, "mmap", vocab_size)``.

    fairseq's builder keeps every length, and at the end every pointer, as Python integers in lists. This builder keeps
    the lengths in an unnamed temporary file next to the data, and accepts many sentences at once. ``vocab_size``, the
    length of the dictionary, decides the integer type.
    """

    def __init__(self, out_file: str, vocab_size: int) -> None:
        self._dtype = best_fitting_int_dtype(vocab_size)
        self._data_file = open(out_file, "wb")  # noqa: SIM115
        self._lengths = tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(out_file)))  # noqa: SIM115
        self._sentences = 0

    def add_sentences(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append sentences: their concatenated ids ``(sum of lengths,)``, and the number of tokens of each."""
        assert len(ids) == int(lengths.sum())
        self._data_file.write(ids.astype(self._dtype).tobytes())
        self._lengths.write(lengths.astype(np.int32).tobytes())
        self._sentences += len(lengths)

    def finalize(self, index_file: str) -> None:
        """Write the data to the disk and close it, then write the index."""
        self._data_file.flush()
        os.fsync(self._data_file.fileno())
        self._data_file.close()
        with MMapIndexedDataset.Index.writer(index_file, self._dtype) as index, self._lengths as lengths:
            file = index._file  # fairseq's writer has put the header there
            file.write(struct.pack("<Q", self._sentences))
            lengths.seek(0)
            shutil.copyfileobj(lengths, file)
            lengths.seek(0)
            address = 0
            while chunk := lengths.read(4 * POINTERS_AT_A_TIME):
                sizes = np.frombuffer(chunk, np.int32).astype(np.int64) * self._dtype().itemsize
                ends = address + np.cumsum(sizes)
                file.write((ends - sizes).tobytes())
                address = int(ends[-1])
            file.flush()
            os.fsync(file.fileno())


def slices_of(blocks: TokenBlockDataset) -> np.ndarray:
    """The flat positions where each block of a ``TokenBlockDataset`` begins and ends, ``(n_blocks, 2)`` int64.

    They come from its ``slice_indices``, since ``sizes`` have 16 bits, which a long sentence overflows.
    """
    return blocks.slice_indices.astype(np.int64)


def flat_tokens(dataset: MMapIndexedDataset) -> np.ndarray:
    """The ids of a binarized split, sentence by sentence ``(N,)``; unmapped when the dataset is garbage-collected."""
    return np.frombuffer(dataset._bin_buffer, dtype=dataset._index.dtype)


def count_symbols(dataset: FairseqDataset, symbols: Sequence[int]) -> tuple[int, list[int]]:
    """The number of tokens of a mapped split, or of several combined, and of occurrences of each symbol.

    Files that fairseq does not map, such as those of older versions, count as empty.
    """
    mapped = [part for part in getattr(dataset, "datasets", [dataset]) if isinstance(part, MMapIndexedDataset)]
    tokens = 0
    counts = [0] * len(symbols)
    for ids in map(flat_tokens, mapped):
        tokens += len(ids)
        for start, stop in _chunks(len(ids)):
            counts = [
                count + int(np.count_nonzero(ids[start:stop] == symbol))
                for count, symbol in zip(counts, symbols, strict=True)
            ]
    return tokens, counts


def combined_splits(path: str) -> list[str]:
    """The splits that ``load_indexed_dataset(path, combine=True)`` joins: ``path``, ``path1``, ``path2``, ..."""
    splits = [path]
    while os.path.exists(f"{path}{len(splits)}.idx"):
        splits.append(f"{path}{len(splits)}")
    return splits
