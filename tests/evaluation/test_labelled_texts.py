"""Labelled texts in TSV files, and the lines and files that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlsm_plugin.evaluation.labelled_texts import LabelledTexts, check_same_kind, read_labelled_texts


def read(folder: Path, content: str, name: str = "train.tsv", **options: bool) -> LabelledTexts:
    (folder / name).write_bytes(content.encode("utf-8"))
    return read_labelled_texts(folder / name, **options)


def test_lines_are_labels_and_texts(tmp_path: Path) -> None:
    found = read(tmp_path, "good\tA name. \r\n\n  \nbad one\t Ünï\u2028code\n")
    assert found == LabelledTexts(tmp_path / "train.tsv", ("good", "bad one"), (("A name.",), ("Ünï\u2028code",)))
    assert (len(found), found.texts_per_line) == (2, 1)
    pairs = read(tmp_path, "1\tWhat?\tThat.\n-0.5\tWho?\tHim.", regression=True)
    assert pairs.texts == (("What?", "That."), ("Who?", "Him."))
    assert (pairs.labels, pairs.texts_per_line) == (("1", "-0.5"), 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tx\nb\n", "line 2 has 1 columns; expected label, text and for pairs a second text"),
        ("a\tx\ty\tz\n", "line 1 has 4 columns"),
        ("a\tx\n\nb\ty\tz\n", "line 3 has 2 texts, the lines before have 1"),
        ("a\tx\nb\t \n", "line 2 has an empty text"),
        ("a\tx\t\n", "line 1 has an empty text"),
        (" \tx\n", "line 1 has an empty label"),
        ("\n \n", "holds no labelled text"),
        ("", "holds no labelled text"),
    ],
)
def test_lines_of_another_form_are_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "train.tsv")) + ".*" + re.escape(message)):
        read(tmp_path, content)


@pytest.mark.parametrize("label", ["good", "nan", "-inf"])
def test_regression_needs_numbers(tmp_path: Path, label: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.tsv, line 2: '{label}' is not a finite number; --regression needs"):
        read(tmp_path, f"0.5\tx\n{label}\ty\n", regression=True)


def of(name: str, *labels: str, texts: int = 1) -> LabelledTexts:
    return LabelledTexts(Path(name), labels, tuple(("x",) * texts for _ in labels))


def test_files_have_the_labels_and_columns_of_the_first(tmp_path: Path) -> None:
    train = of("train", "a", "b", "b")
    check_same_kind(train, [of("valid", "b"), of("test", "a", "a")], regression=False)
    check_same_kind(of("train", "0.5"), [of("valid", "0.7")], regression=True)
    with pytest.raises(ValueError, match=r"train has only one label \(a\)"):
        check_same_kind(of("train", "a", "a"), [], regression=False)
    with pytest.raises(ValueError, match="valid has labels that train lacks: c, d"):
        check_same_kind(train, [of("valid", "d", "a", "c")], regression=False)
    for regression in (False, True):
        with pytest.raises(ValueError, match="test has 2 texts in a line, train has 1"):
            check_same_kind(train, [of("valid", "a"), of("test", "a", texts=2)], regression=regression)


def test_a_byte_order_mark_is_not_a_part_of_a_label(tmp_path: Path) -> None:
    path = tmp_path / "marked.tsv"
    path.write_text("pos\tgood\r\nneg\tbad\r\npos\tfine\r\n", encoding="utf-8-sig")
    assert read_labelled_texts(path).labels == ("pos", "neg", "pos")
