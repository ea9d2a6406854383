"""Read raw text for the tokenizer and the binarizer: UTF-8, plain or gzip, with one sentence per line."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from mlsm_plugin.files.progress import Progress

PathLike = str | os.PathLike[str]

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 16 << 20  # bounds the memory for a file without newlines
LINES_BETWEEN_REPORTS = 1000


def check_text_files(paths: Sequence[PathLike]) -> int:
    """Check, before hours of work, that no file is missing or empty.

    Args:
        paths: the text files, at least one.

    Returns:
        The total size of the files in bytes (compressed size for gzip files).

    Raises:
        ValueError: no file was given, a file is empty, or it is a pipe.
        OSError: a file is missing, is a directory or cannot be read.
    """
    if not paths:
        raise ValueError("no text file was given")
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is not a regular file; write the text to a file (.gz if it is large)")
            if not file.read(1):
                raise ValueError(f"{path} is empty")
        total += status.st_size
    return total


def read_lines(path: PathLike, report: Callable[[int], object] | None = None) -> Iterator[str]:
    """Yield the lines of a text file without surrounding whitespace; a blank line is ``""``.

    Only the newline ends a line (not U+0085 or U+2028, which count as whitespace). A byte-order mark at the start is
    skipped. gzip is recognized by its first bytes, whatever the file is called.

    Args:
        path: the file.
        report: called with the number of bytes of the file read since the last call.

    Raises:
        ValueError: bytes are not UTF-8 or a line is too long (both with file and line number), gzip data are damaged,
            or the file has only blank lines.
        OSError: the file cannot be read.
    """
    holds_text = False
    with open(path, "rb") as file:
        reported = 0
        for number, raw in enumerate(_raw_lines(Path(path), file), 1):
            line = _decode(path, number, raw).strip()
            holds_text = holds_text or bool(line)
            if report is not None and number % LINES_BETWEEN_REPORTS == 0:
                report(file.tell() - reported)
                reported = file.tell()
            yield line
        if report is not None:
            report(file.tell() - reported)
    if not holds_text:
        raise ValueError(f"{path} holds no text, only blank lines")


def numbered_lines(path: PathLike) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line that is not blank; whitespace in it stays.

    What ends a line, byte-order marks, gzip and errors are as in :func:`read_lines`, but a file may be empty.
    """
    with open(path, "rb") as file:
        for number, raw in enumerate(_raw_lines(Path(path), file), 1):
            line = _decode(path, number, raw).rstrip("\r\n")
            if line and not line.isspace():
                yield number, line


def read_text(paths: Sequence[PathLike], report: Callable[[int], object] | None = None) -> Iterator[str]:
    """Yield the lines of several files, with a blank line (a document boundary) between two files.

    Arguments and errors are those of ``read_lines``.
    """
    for index, path in enumerate(paths):
        if index:
            yield ""
        yield from read_lines(path, report)


def progress_bar(name: str, total_bytes: int, show: bool) -> Progress:
    """Progress in bytes of text files; pass its ``update`` to the readers as ``report``."""
    return Progress(total=total_bytes, desc=name, unit="B", unit_scale=True, leave=False, disable=not show)


def _raw_lines(path: Path, file: io.BufferedReader) -> Iterator[bytes]:
    compressed = file.peek(2)[:2] == GZIP_MAGIC
    stream: BinaryIO = file
    if compressed:
        stream = cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)), 1 << 16))
    number = 0
    while True:
        number += 1
        try:
            raw = stream.readline(MAX_LINE_BYTES + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(
                f"{path}: damaged gzip file, from line {number} on ({error}); compress the text again"
            ) from None
        if not raw:
            return
        if len(raw) > MAX_LINE_BYTES:
            limit = MAX_LINE_BYTES >> 20
            raise ValueError(f"{path}:{number}: longer than {limit} MiB; write one sentence per line")
        yield raw


def _decode(path: PathLike, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{path}:{number}: not UTF-8 (byte 0x{byte:02x} at column {error.start + 1}); convert the file to UTF-8"
        ) from None
