"""Documents of text and JSON lines, their names, and what is no document."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.search.documents import Document, StoredDocuments, as_line, number_of_repeated_names, read_documents


def test_passages_end_at_blank_lines_and_after_some_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\na\nb\nc\n\n\nd\n")
    documents = list(read_documents([path], passage_lines=2))
    assert documents == [Document("text.txt:2", "a b"), Document("text.txt:4", "c"), Document("text.txt:7", "d")]


def test_objects_of_json_lines_have_their_names(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 7, "text": "a\\n b"}\n{"contents": "c"}\n'))
    documents = list(read_documents([path], passage_lines=2))
    assert documents == [Document("7", "a b"), Document("docs.jsonl.gz:2", "c")]


def test_an_object_without_a_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises(ValueError, match="line 2 has no text"):
        list(read_documents([path], passage_lines=2))


def test_without_an_id_and_with_the_same_file_name_documents_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "docs.jsonl", tmp_path / "b" / "docs.jsonl"]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"id": null, "text": "c"}\n{"id": "", "text": "d"}\n')
    names = [document.name for document in read_documents(paths, passage_lines=2)]
    assert names == [f"{path}:{line}" for path in paths for line in (1, 2)]
    assert number_of_repeated_names(names) == 0
    assert number_of_repeated_names([*names, "x", "x", "x", names[0]]) == 3


NO_IDS = [({"a": 1}, "must be text or a whole number"), (True, "got true"), ("\ud800", "half of a")]


@pytest.mark.parametrize(("name", "problem"), NO_IDS)
def test_an_id_that_is_no_text_is_one_line(tmp_path: Path, name: object, problem: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(json.dumps({"id": name, "text": "a"}) + "\n")
    with pytest.raises(ValueError, match=f"line 1.*{problem}"):
        list(read_documents([path], passage_lines=2))


def test_documents_are_read_by_several_threads(tmp_path: Path) -> None:
    documents = [Document(str(number), f"text {number} " * (number % 7 + 1)) for number in range(300)]
    lines = [as_line(document) for document in documents]
    (tmp_path / "documents.jsonl").write_bytes(b"".join(lines))
    np.save(tmp_path / "documents.starts.npy", np.cumsum([0, *map(len, lines)]))
    stored = StoredDocuments(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        numbers = list(range(300)) * 20
        assert list(pool.map(stored.__getitem__, numbers)) == [documents[number] for number in numbers]
    stored.close()
