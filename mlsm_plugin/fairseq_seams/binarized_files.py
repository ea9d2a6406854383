"""Check the files of a binarized split before fairseq maps them; it would read memory that a wrong index names."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fairseq.data import indexed_dataset
from fairseq.data.indexed_dataset import IndexedDataset, MMapIndexedDataset

MAGIC = MMapIndexedDataset.Index._HDR_MAGIC
OLD_MAGIC = IndexedDataset._HDR_MAGIC  # not mapped; fairseq checks what it reads
HEADER = struct.Struct("<QBQ")  # version, code of the type, number of sentences
AT_A_TIME = 1 << 24


def check_splits(path: str | os.PathLike[str], num_symbols: int, *, combine: bool = False) -> None:
    """Check the split at ``path`` (``DATA_BIN/train``), and with ``combine`` those that follow it (``train1``, ...).

    Args:
        path: without ``.idx`` and ``.bin``; a split that does not exist is not checked.
        num_symbols: length of the dictionary.

    Raises:
        OSError: a file cannot be read.
        ValueError: the index or the data are damaged, or hold symbols that the dictionary lacks (names the file).
    """
    for number in itertools.count():
        own = f"{os.fspath(path)}{number or ''}"
        if not os.path.isfile(f"{own}.idx"):
            return
        problem = _problem(Path(f"{own}.idx"), Path(f"{own}.bin"), num_symbols)
        if problem:
            raise ValueError(f"{problem}; write it again with `mlsm binarize`")
        if not combine:
            return


def _problem(index: Path, data: Path, num_symbols: int) -> str | None:
    """What is wrong with the two files; None: nothing."""
    size = index.stat().st_size
    with open(index, "rb") as file:
        if file.read(len(OLD_MAGIC)) == OLD_MAGIC:
            return None
        file.seek(0)
        magic, header = file.read(len(MAGIC)), file.read(HEADER.size)
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
    width, address = np.dtype(kind).itemsize, 0
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
