"""``mlsm search``: index and query as a user runs them, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from mlsm_plugin.cli.search import BOLD, PLAIN, highlighted, printable
from tests.conftest import failing_mlsm, mlsm
from tests.search.searched import make_encoder, write_documents
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


def test_index_and_query(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    model, dictionary = make_encoder(tiny.text, tmp_path)
    lines = write_documents(tiny.text, tmp_path / "docs.txt")
    index = tmp_path / "an index"
    command = (
        "search",
        "index",
        tmp_path / "docs.txt",
        "--model",
        model,
        "--dictionary",
        dictionary,
        "--output",
        index,
    )
    mlsm(*command)
    printed = capsys.readouterr().out
    assert "30 documents, " in printed
    assert shlex.split(printed.splitlines()[-1])[1:] == ["search", "query", str(index), "your words"]
    mlsm(*command)  # again: nothing to do
    capsys.readouterr()
    mlsm("search", "query", index, lines[4], "--count", 2)
    shown = capsys.readouterr().out
    assert "  1. docs.txt:9  (score" in shown
    assert "property" in shown
    assert "words:" in shown
    (tmp_path / "queries.txt").write_text("\n".join(lines[:3]))
    for mode in ("codes", "words"):
        mlsm("search", "query", index, "--input", tmp_path / "queries.txt", "--count", 30, "--json", "--by", mode)
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for line, record in zip(lines[:3], records, strict=True):
            assert line in [hit["text"] for hit in record["results"]]
    mlsm("search", "query", index, "name", "--by", "words")


def test_what_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert "is not an index" in failing_mlsm(capsys, "search", "query", tmp_path, "name")
    assert "either a text or --input" in failing_mlsm(capsys, "search", "query", tmp_path)
    line = failing_mlsm(capsys, "search", "query", tmp_path, "name", "--by", "words", "--model", tmp_path)
    assert "--model: --by words needs no model; leave it out" in line


def test_a_model_that_has_moved_is_asked_for(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    model, dictionary = make_encoder(tiny.text, tmp_path)
    write_documents(tiny.text, tmp_path / "docs.txt", number=3)
    parts = ("--model", model, "--dictionary", dictionary)
    mlsm("search", "index", tmp_path / "docs.txt", *parts, "--output", tmp_path / "index")
    model.rename(tmp_path / "moved")
    line = failing_mlsm(capsys, "search", "query", tmp_path / "index", "name")
    assert "does not exist; pass --model, or --by words" in line
    mlsm("search", "query", tmp_path / "index", "name", "--model", tmp_path / "moved")
    mlsm("search", "query", tmp_path / "index", "name", "--by", "words")


def test_a_document_does_not_control_the_terminal() -> None:
    text = "\x1b[31mred\x07\u202e"
    assert printable(text) == "\ufffd[31mred\ufffd\ufffd"
    assert highlighted(text, [(5, 8)]) == f"\ufffd[31m{BOLD}red{PLAIN}\ufffd\ufffd"


def test_the_tokens_of_a_result_are_bold() -> None:
    assert highlighted("the name of", [(4, 8), (4, 8)]) == f"the {BOLD}name{PLAIN} of"
    assert highlighted("a" * 400, [(399, 400)]) == "a" * 300 + "..."
