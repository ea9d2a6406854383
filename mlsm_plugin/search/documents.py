"""Documents that are searched: passages of text files, or the objects of JSON lines."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.text.text_files import check_text, is_json_lines, json_objects, read_lines

TEXT_KEYS = ("text", "contents", "body")


@dataclass(frozen=True)
class Document:
    """A text that can be found, and how it is called in results."""

    name: str
    text: str


def read_documents(paths: Sequence[PathLike], *, passage_lines: int) -> Iterator[Document]:
    """The documents of several files, in order.

    A file of JSON lines has an object for each document, with the text as ``text``, ``contents`` or ``body``, and
    perhaps an ``id``. Of other files, up to ``passage_lines`` consecutive lines are a document, and a blank line ends
    one; its name is the file and the number of its first line. Compressed files are read as they are.

    ValueError, with file and line, if an object has no text, or a file is no text.
    """
    for path in paths:
        if is_json_lines(path):
            yield from _objects(path)
        else:
            yield from _passages(path, passage_lines)


def _objects(path: PathLike) -> Iterator[Document]:
    for number, item in json_objects(path):
        text = next((item[key] for key in TEXT_KEYS if isinstance(item.get(key), str)), None)
        if text is None:
            raise ValueError(f"{path}, line {number} has no text; expected one of the keys {', '.join(TEXT_KEYS)}")
        check_text(text, f"{path}, line {number}")
        identity = item.get("id", f"{Path(path).name}:{number}")
        yield Document(str(identity), " ".join(text.split()))


def _passages(path: PathLike, passage_lines: int) -> Iterator[Document]:
    lines: list[str] = []
    first = 1
    for number, line in enumerate(read_lines(path), 1):
        if line and not lines:
            first = number
        if line:
            lines.append(line)
        if lines and (not line or len(lines) == passage_lines):
            yield Document(f"{Path(path).name}:{first}", " ".join(lines))
            lines = []
    if lines:
        yield Document(f"{Path(path).name}:{first}", " ".join(lines))


class StoredDocuments:
    """The documents of an index, read from disk one by one."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "documents.jsonl").open("rb")
        self._starts = np.load(folder / "documents.starts.npy", mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Document:
        self._file.seek(int(self._starts[number]))
        item = json.loads(self._file.read(int(self._starts[number + 1] - self._starts[number])))
        return Document(item["name"], item["text"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def as_line(document: Document) -> bytes:
    """A document as a line of ``documents.jsonl``."""
    return json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False).encode() + b"\n"
