"""Read raw text for the tokenizer and the binarizer: UTF-8, plain or compressed, with one sentence per line."""

import importlib
import io
import logging
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from mlsm_plugin.core.files.atomic_files import PathLike, parse_json
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.progress import Progress

# the first bytes of compressed files
COMPRESSED = {
    "gzip": rb"\x1f\x8b",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    "xz": rb"\xfd7zXZ\0",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "zip": rb"PK\x03\x04",
}
READERS = {"gzip": "gzip", "bzip2": "bz2", "xz": "lzma"}  # modules of Python, which may have been built without them
DAMAGED = (OSError, EOFError, zlib.error)
FIRST_BYTES = 10  # bytes that tell how a file is compressed
# files that are not raw text: pattern of the first line that is not blank, kind of file, and remedy
OTHER_KINDS = {
    r"<!doctype\s+html|<html[\s>]": ("an HTML page", "take the text out of it"),
    r"<\?xml\s": ("XML", "take the text out of it"),
    r"%PDF-|%!PS|\{\\rtf": ("a document in PDF, PostScript or RTF", "take the text out of it"),
    r"version https://git-lfs\.github\.com/spec/": ("a pointer of Git LFS to a file", "get the file: git lfs pull"),
    r"/annex/objects/": ("a pointer of git-annex to a file", "get the file: git annex get"),
}
# Whitespace and ESC, which colours the output of programs, do not count. Every second byte of UTF-16 is in this set.
CONTROLS = bytes({*range(0x20), 0x7F} - {*b"\t\n\v\f\r\x1b"})
# control characters in a line from which on it counts as binary
FEWEST_CONTROLS = 4
SHARE_OF_CONTROLS = 0.2
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
JSON_ENDINGS = (".jsonl", ".ndjson")  # of JSON lines, in upper or lower case
TABLE_ENDINGS = (".csv", ".tsv")
COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz")
FIRST_LINES = 100  # lines to check before hours of work
JSON_LINES = 3  # a file that begins with this many JSON objects holds JSON lines
MAX_LINE_BYTES = 16 << 20  # bounds the memory for a file without newlines
LINES_BETWEEN_REPORTS = 1000

logger = logging.getLogger(__name__)


def check_text_files(paths: Sequence[PathLike]) -> int:
    """Check before hours of work that no file is missing or empty, and that their first lines are text.

    Returns their total (compressed) size in bytes. ValueError if there are no files, a file is empty or a pipe, or as
    for :func:`read_lines`; OSError if a file is missing, is a directory or cannot be read.
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
        for _ in islice(read_lines(path), FIRST_LINES):
            pass
        total += status.st_size
    return total


def read_lines(path: PathLike, report: Callable[[int], object] | None = None) -> Iterator[str]:
    """Yield the lines of a text file without surrounding whitespace; a blank line is ``""``.

    Only the newline ends a line (not U+0085 or U+2028, which count as whitespace). A byte-order mark at the start is
    skipped. gzip, bzip2 and xz are recognized by their first bytes, whatever the file is called. ``report`` is called
    with the number of bytes of the file read since the last call.

    ValueError if bytes are not UTF-8 text or a line is too long (both with file and line number), compressed data are
    damaged, lines end in carriage returns or are JSON, the file is named as a table, begins like HTML or another kind
    of ``OTHER_KINDS``, or has only blank lines; OSError if it cannot be read.
    """
    if _without_endings(path, COMPRESSED_ENDINGS).suffix.lower() in TABLE_ENDINGS:
        raise ValueError(
            f"{path} is a table, whose header and other columns would be read as text; take the column of text out of "
            "it (mlsm adapt does this with --column), or rename the file if it is plain text"
        )
    holds_text = False
    with open(path, "rb") as file:
        reported = 0
        for number, whole in enumerate(_without_json(path, _lines(path, file)), 1):
            line = whole.strip()
            holds_text = holds_text or bool(line)
            if report is not None and number % LINES_BETWEEN_REPORTS == 0:
                report(file.tell() - reported)
                reported = file.tell()
            yield line
        if report is not None:
            report(file.tell() - reported)
    if not holds_text:
        raise ValueError(f"{path} holds no text, only blank lines")


def check_text(text: str, where: str = "the text") -> None:
    """Raise ValueError if a text, such as from JSON or a command line, contains NUL or half a character."""
    if "\0" in text:
        raise ValueError(f"{where} has a NUL character, which text never has; leave it out")
    surrogate = LONE_SURROGATE.search(text)
    if surrogate is not None:
        raise ValueError(
            f"{where} is not Unicode text: at place {surrogate.start() + 1} is U+{ord(surrogate[0]):04X}, which is "
            "half of a character or a byte that is not UTF-8; correct it"
        )


def numbered_lines(path: PathLike, *, json_lines: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line that is not blank; whitespace in it is kept.

    Ends of lines, byte-order marks, compression and errors are as in :func:`read_lines`, but a file may be empty, and
    with ``json_lines`` the lines may be JSON.
    """
    with open(path, "rb") as file:
        lines = _lines(path, file)
        for number, whole in enumerate(lines if json_lines else _without_json(path, lines), 1):
            line = whole.rstrip("\r\n")
            if line and not line.isspace():
                yield number, line


def is_json_lines(path: PathLike) -> bool:
    """Whether a file is named ``*.jsonl`` or ``*.ndjson``, perhaps with the ending of a compressed file."""
    return _without_endings(path, COMPRESSED_ENDINGS).suffix.lower() in JSON_ENDINGS


def name_without_endings(path: PathLike) -> str:
    """The name of a file of JSON lines without the endings for JSON lines and for compression."""
    return _without_endings(path, (*JSON_ENDINGS, *COMPRESSED_ENDINGS)).name


def _without_endings(path: PathLike, endings: Sequence[str]) -> Path:
    path = Path(path)
    while path.suffix.lower() in endings:
        path = path.with_suffix("")
    return path


def json_objects(path: PathLike) -> Iterator[tuple[int, JsonObject]]:
    """As :func:`numbered_lines`, for JSON objects; empty for other values. ValueError names a line that is not JSON.

    Warns about the first line whose object repeats a key.
    """
    is_said = False
    for number, line in numbered_lines(path, json_lines=True):
        repeated: set[str] = set()
        try:
            item = parse_json(line, repeated)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if repeated and not is_said:
            is_said = True
            logger.warning(f"{path}, line {number} has the key {min(repeated)!r} several times; its last value counts")
        yield number, item if isinstance(item, dict) else {}


def read_text(paths: Sequence[PathLike], report: Callable[[int], object] | None = None) -> Iterator[str]:
    """Yield the lines of several files as :func:`read_lines`, with a blank line (a document boundary) between files."""
    for index, path in enumerate(paths):
        if index:
            yield ""
        yield from read_lines(path, report)


def progress_bar(name: str, total_bytes: int, show: bool = True) -> Progress:
    """Progress in bytes of text files; pass its ``update`` to the readers as ``report``."""
    return Progress(total=total_bytes, desc=name, unit="B", unit_scale=True, leave=False, disable=not show)


def _lines(path: PathLike, file: io.BufferedReader) -> Iterator[str]:
    """The lines of a file with their line ends."""
    stream, kind, errors = _decompressed(path, file)
    number = breaks = 0
    begun = False
    while True:
        number += 1
        try:
            raw = stream.readline(MAX_LINE_BYTES + 1)
        except errors as error:
            if getattr(error, "errno", None) is not None:  # an error of the disk, not of the data
                raise
            raise ValueError(
                f"{path}: damaged {kind} file, from line {number} on ({error}); compress the text again"
            ) from None
        if not raw:
            return
        breaks += raw.rstrip(b"\r\n").count(b"\r")
        if breaks >= number:
            raise ValueError(
                f"{path}:{number}: carriage returns (CR) stand where newlines should end the lines; convert the file: "
                "tr '\\r' '\\n' < FILE > NEW_FILE"
            )
        if len(raw) > MAX_LINE_BYTES:
            limit = MAX_LINE_BYTES >> 20
            raise ValueError(f"{path}:{number}: longer than {limit} MiB; write one sentence per line")
        _check_is_text(path, number, raw)
        line = _decode(path, number, raw)
        if not begun and line.strip():
            begun = True
            _check_kind(path, line)
        yield line


def _check_is_text(path: PathLike, number: int, raw: bytes) -> None:
    """Raise ValueError if a line is binary data or UTF-16, although its bytes are valid UTF-8."""
    if b"\0" in raw:
        raise ValueError(
            f"{path}:{number}: a NUL byte at column {raw.index(0) + 1}, which UTF-8 text does not have; the file is "
            "UTF-16 (convert it: iconv -f UTF-16LE -t UTF-8 FILE > NEW_FILE), binary, or damaged (leave such bytes "
            "out: tr -d '\\000' < FILE > NEW_FILE)"
        )
    controls = len(raw) - len(raw.translate(None, CONTROLS))
    if controls >= max(FEWEST_CONTROLS, SHARE_OF_CONTROLS * len(raw)):
        raise ValueError(
            f"{path}:{number}: {controls} of {len(raw)} bytes are control characters; the file is UTF-16 (convert it: "
            "iconv -f UTF-16LE -t UTF-8 FILE > NEW_FILE) or binary"
        )


def _check_kind(path: PathLike, first: str) -> None:
    """Raise ValueError if the first line that is not blank shows that the file is not raw text."""
    for beginning, (kind, remedy) in OTHER_KINDS.items():
        if re.match(beginning, first.lstrip(), re.IGNORECASE):
            raise ValueError(
                f"{path} begins as {kind}, which is not raw text; {remedy} (if it is text, change how it begins)"
            )


def _decompressed(path: PathLike, file: io.BufferedReader) -> tuple[IO[bytes], str, tuple[type[Exception], ...]]:
    """The content of a file, its compression, and the errors that indicate damage."""
    first = file.peek(FIRST_BYTES)
    kind = next((kind for kind, magic in COMPRESSED.items() if re.match(magic, first)), "")
    if not kind:
        return file, kind, ()
    try:
        reader: Any = importlib.import_module(READERS[kind])
    except (KeyError, ImportError):
        raise ValueError(f"{path} is compressed with {kind}, which cannot be read; compress it with gzip") from None
    return io.BufferedReader(reader.open(file), 1 << 16), kind, (*DAMAGED, getattr(reader, "LZMAError", OSError))


def _without_json(path: PathLike, lines: Iterator[str]) -> Iterator[str]:
    """The lines; ValueError if the first lines that are not blank, or all lines of a short file, are JSON objects."""
    first = []
    objects = 0
    for line in islice(lines, FIRST_LINES):
        first.append(line)
        if line.strip():
            objects = objects + 1 if _is_json_object(line) else 0
            if objects in (0, JSON_LINES):
                break
    if objects:
        raise ValueError(
            f"{path} holds JSON lines, not text; take the text out of them, for example: "
            "jq -r '.text, \"\"' FILE > NEW_FILE"
        )
    yield from first
    yield from lines


def _is_json_object(line: str) -> bool:
    """Whether a line is a JSON object, or a list of them."""
    if not line.lstrip().startswith(("{", "[")):
        return False
    try:
        value = parse_json(line)
    except ValueError:
        return False
    value = value[0] if isinstance(value, list) and value else value
    return isinstance(value, dict) and bool(value)


def _decode(path: PathLike, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{path}:{number}: not UTF-8 (byte 0x{byte:02x} at column {error.start + 1}); convert the file to UTF-8"
        ) from None
