"""The documents to search: passages of text files, or the objects of JSON lines."""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike, parse_json
from mlsm_plugin.core.files.npy_files import npy_header
from mlsm_plugin.core.text.text_files import check_text, is_json_lines, json_objects, read_lines

TEXT_KEYS = ("text", "contents", "body")


@dataclass(frozen=True)
class Document:
    """A text to search, and its name in results."""

    name: str
    text: str


def read_documents(paths: Sequence[PathLike], *, passage_lines: int) -> Iterator[Document]:
    """The documents of several files, in order.

    A file of JSON lines has one object per document, with the text as ``text``, ``contents`` or ``body``, and
    optionally an ``id``. In other files, up to ``passage_lines`` consecutive lines form a document, and a blank line
    ends it. Such a document is named after its file and the number of its first line; if several files have the same
    name, their paths are used. Compressed files can be read without unpacking.

    ValueError, with file and line, if an object has no text, or a file is not text.
    """
    for path, file_name in zip(paths, names_of(paths), strict=True):
        if is_json_lines(path):
            yield from _objects(path, file_name)
        else:
            yield from _passages(path, file_name, passage_lines)


def names_of(paths: Sequence[PathLike]) -> list[str]:
    """What the documents of each file are named after: its name, or its path if several files have the same name."""
    name_counts = Counter(Path(path).name for path in paths)
    return [Path(path).name if name_counts[Path(path).name] == 1 else str(path) for path in paths]


def number_of_repeated_names(names: Iterable[str]) -> int:
    """The number of documents that repeat an earlier name; takes 8 bytes of memory per document."""
    hashes = array("Q")
    for name in names:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return len(hashes) - len(np.unique(np.array(hashes)))


def _objects(path: PathLike, file_name: str) -> Iterator[Document]:
    for number, item in json_objects(path):
        text = next((item[key] for key in TEXT_KEYS if isinstance(item.get(key), str)), None)
        if text is None:
            raise ValueError(f"{path}, line {number} has no text; expected one of the keys {', '.join(TEXT_KEYS)}")
        check_text(text, f"{path}, line {number}")
        name = item.get("id")
        if name is None or name == "":
            name = f"{file_name}:{number}"
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise ValueError(f"{path}, line {number}: the id must be text or a whole number, got {json.dumps(name)}")
        check_text(str(name), f"the id in {path}, line {number}")
        yield Document(str(name), " ".join(text.split()))


def _passages(path: PathLike, file_name: str, passage_lines: int) -> Iterator[Document]:
    lines: list[str] = []
    first = 1
    for number, line in enumerate(read_lines(path), 1):
        if line and not lines:
            first = number
        if line:
            lines.append(line)
        if lines and (not line or len(lines) == passage_lines):
            yield Document(f"{file_name}:{first}", " ".join(lines))
            lines = []
    if lines:
        yield Document(f"{file_name}:{first}", " ".join(lines))


class StoredDocuments:
    """The documents of an index, read from disk one at a time; ValueError if a file is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        path = folder / "documents.jsonl"
        self._starts = mapped(folder / "documents.starts.npy")
        if not path.is_file() or path.stat().st_size != self._starts[-1]:
            raise damaged(path)
        self._path = path
        self._file = path.open("rb")
        self._lock = Lock()  # a page that reads several documents at once shares the place in the file

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Document:
        start = int(self._starts[number])
        with self._lock:
            self._file.seek(start)
            line = self._file.read(int(self._starts[number + 1]) - start)
        try:
            item = parse_json(line)
            return Document(item["name"], item["text"])
        except (ValueError, KeyError, TypeError):
            raise damaged(self._path) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def as_line(document: Document) -> bytes:
    """A document as a line of ``documents.jsonl``."""
    return json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False).encode() + b"\n"


def mapped(path: Path) -> np.ndarray:
    """Memory-map an array file of an index; ValueError if it is missing or damaged."""
    if npy_header(path) is None:
        raise damaged(path)
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def damaged(path: Path) -> ValueError:
    """The error for a missing or damaged file of an index."""
    return ValueError(f"{path} is missing or damaged; delete {path.parent} and build the index again")
