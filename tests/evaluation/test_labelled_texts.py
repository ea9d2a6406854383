"""Labelled texts in TSV files, and the lines and files that are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlsm_plugin.evaluation.labelled_texts import LabelledTexts, check_same_kind, read_labelled_texts


def read(folder: Path, content: str, name: str = "train.tsv", **options: bool) -> LabelledTexts:
    (folder / name).write_bytes(content.encode("utf-8"))
    return read_labelled_texts(folder / name, **options)


def test_lines_are_labels_and_texts(tmp_path: Path) -> None:
    found = read(tmp_path, "good\tA name. \r\n\n  \nbad one\t Ünï\u2028code\n")
    texts = (("A name.",), ("Ünï\u2028code",))
    assert found == LabelledTexts(tmp_path / "train.tsv", ("good", "bad one"), texts, (1, 4))
    assert (len(found), found.texts_per_line) == (2, 1)
    pairs = read(tmp_path, "1\tWhat?\tThat.\n-0.5\tWho?\tHim.", regression=True)
    assert pairs.texts == (("What?", "That."), ("Who?", "Him."))
    assert (pairs.labels, pairs.texts_per_line) == (("1", "-0.5"), 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tx\nb\n", "line 2 has 1 columns; expected label, text and for pairs a second text"),
        ("a\tx\ty\tz\n", "line 1 has 4 columns"),
        ("a\tx\n\nb\ty\tz\n", "line 3 has 2 texts, but the lines before have 1"),
        ("a\tx\nb\t \n", "line 2 has an empty text"),
        ("a\tx\t\n", "line 1 has an empty text"),
        (" \tx\n", "line 1 has an empty label"),
        ("\n \n", "holds no labelled text"),
        ("", "holds no labelled text"),
        ("x\ty\na\tx\nb\rc\ty\n", "line 3: the label 'b\\rc' has a carriage return"),
    ],
)
def test_lines_of_another_form_are_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "train.tsv")) + ".*" + re.escape(message)):
        read(tmp_path, content)


@pytest.mark.parametrize("label", ["good", "nan", "-inf"])
def test_regression_needs_numbers(tmp_path: Path, label: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.tsv, line 2: '{label}' is not a finite number, as scores are"):
        read(tmp_path, f"0.5\tx\n{label}\ty\n", regression=True)


GLUE_LINES = {
    "boolq": ({"question": "is it so", "passage": "Yes.\nIt  is."}, ("is it so", "Yes. It is.")),
    "multirc": (
        {"question": "Who?", "answer": "He {0}.", "paragraph": "A\tman."},
        ("Question: Who? Answer: He {0}.", "A man."),
    ),
    "wsc": (
        {"span1_text": "Ann", "span2_text": "she", "text": "Ann ran since she could."},
        ('Does "she" refer to "Ann" in this passage?', "Ann ran since she could."),
    ),
    "rte": ({"sentence1": "One.", "sentence2": "Two."}, ("One.", "Two.")),
    "qqp": ({"question1": "A?", "question2": "B?"}, ("A?", "B?")),
    "mnli": ({"premise": "P.", "hypothesis": "H."}, ("P.", "H.")),
}


@pytest.mark.parametrize("task", GLUE_LINES)
def test_tasks_of_the_pipeline_are_pairs(tmp_path: Path, task: str) -> None:
    item, texts = GLUE_LINES[task]
    labels = (0, 1, "2", True)
    lines = [json.dumps({**item, "idx": {"paragraph": 1}, "label": label}) for label in labels]
    found = read(tmp_path, "\n\n".join(lines), f"{task}.train.jsonl")
    assert (found.labels, found.texts, found.lines) == (("0", "1", "2", "1"), (texts,) * 4, (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\n", "line 1 is not JSON"),
        ("[1]", "line 1 needs a label, text or a whole number, and texts: boolq: question, passage; multirc: quest"),
        ('{"question": "a", "label": 1}', "line 1 needs a label"),
        ('{"premise": "a", "hypothesis": "b"}', "line 1 needs a label"),
        ('{"premise": "a", "hypothesis": "b", "label": 0.5}', "line 1 needs a label"),
        ('{"premise": " ", "hypothesis": "b", "label": 0}', "line 1 needs a label"),
        ('{"question": "a", "answer": "", "paragraph": "b", "label": 0}', "line 1 needs a label"),
        ('{"premise": "a", "hypothesis": "b", "label": " "}', "line 1 has an empty label"),
        ("\n", "holds no labelled text"),
    ],
)
def test_json_lines_of_another_form_are_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "x.jsonl")) + ".*" + re.escape(message)):
        read(tmp_path, content, "x.jsonl")


def test_json_lines_have_no_header(tmp_path: Path) -> None:
    rows = [("a", 0), ("b", 0), ("c", 1), ("d", 1)]
    lines = [json.dumps({"premise": text, "hypothesis": "b", "label": label}) for text, label in rows]
    with pytest.raises(ValueError, match="have no header; leave --header out"):
        read(tmp_path, "\n".join(lines), "x.jsonl", header=True)
    train, other = read(tmp_path, "\n".join(lines), "x.jsonl"), read(tmp_path, lines[3].replace("1", "2"), "y.jsonl")
    with pytest.raises(ValueError, match=r"labels that .*x\.jsonl lacks: 2$"):
        check_same_kind(train, [other], regression=False)
    with pytest.raises(ValueError, match=r"or pass --allow-single-labels$"):
        check_same_kind(read(tmp_path, "\n".join(lines[1:]), "x.jsonl"), [], regression=False)


def of(name: str, *labels: str, texts: int = 1) -> LabelledTexts:
    lines = tuple(range(1, len(labels) + 1))
    return LabelledTexts(Path(name), labels, tuple((f"{name} {line}",) * texts for line in lines), lines)


def test_files_have_the_labels_and_columns_of_the_first(tmp_path: Path) -> None:
    train = of("train", "a", "b", "b", "a")
    check_same_kind(train, [of("valid", "b"), of("test", "a", "a")], regression=False)
    check_same_kind(of("train", "0.5"), [of("valid", "0.7")], regression=True)
    with pytest.raises(ValueError, match=r"train has only one label \(a\)"):
        check_same_kind(of("train", "a", "a"), [], regression=False)
    with pytest.raises(ValueError, match="train: no two texts have the same label; a line is the label, a tab and"):
        check_same_kind(of("train", "a", "b", "c"), [of("test", "c", "a")], regression=False, allow_single=True)
    one_shot = of("train", "a", "b", "c")
    check_same_kind(one_shot, [of("test", "c", "a", "c")], regression=False, allow_single=True)
    contradicting = LabelledTexts(Path("one text"), ("a", "b"), (("x",), ("x",)), (1, 2))
    check_same_kind(train, [contradicting], regression=False)
    exchanged = LabelledTexts(Path("exchanged"), ("good", "bad", "good"), (("a",), ("a",), ("a",)), (1, 2, 3))
    for learned, held_out in ((exchanged, []), (train, [exchanged])):
        with pytest.raises(ValueError, match=r"exchanged has more labels \(2\) than different texts \(1\); a line is"):
            check_same_kind(learned, held_out, regression=False, allow_single=True)
    with pytest.raises(ValueError, match="valid has labels that train lacks: c, d"):
        check_same_kind(train, [of("valid", "d", "a", "c")], regression=False)
    for regression in (False, True):
        with pytest.raises(ValueError, match="test has 2 texts in a line, train has 1"):
            check_same_kind(train, [of("valid", "a"), of("test", "a", texts=2)], regression=regression)


def test_a_header_that_counts_as_a_text_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_same_kind(of("train", "a", "b", "b", "a"), [of("test", "a")], regression=False, allow_single=True)
    check_same_kind(of("train", "a", "b", "b"), [of("test", "b", "a")], regression=False, allow_single=True)
    assert not caplog.messages
    for held_out in (of("test", "label", "a"), of("test", "a")):
        caplog.clear()
        check_same_kind(of("train", "label", "b", "b", "a"), [held_out], regression=False, allow_single=True)
        assert caplog.messages == [
            "train, line 1: no other text has the label 'label'; if the first line names the columns, pass --header"
        ]


def test_a_header_is_skipped(tmp_path: Path) -> None:
    content = "\n" + "label\ttext\npos\tgood\nneg\tbad\n"
    assert read(tmp_path, content).labels == ("label", "pos", "neg")
    found = read(tmp_path, content, header=True)
    assert (found.labels, found.lines) == (("pos", "neg"), (3, 4))
    numbers = read(tmp_path, "score\n0.5\tgood\n", header=True, regression=True)  # a header may have other columns
    assert numbers.labels == ("0.5",)
    with pytest.raises(ValueError, match=r"train\.tsv holds no labelled text"):
        read(tmp_path, "label\ttext\n", header=True)


@pytest.mark.parametrize(("content", "regression"), [("pos\tx\nneg\ty\npos\tz\n", False), ("0.5\tx\n1\ty\n", True)])
def test_a_first_line_that_is_no_header_is_not_skipped_in_silence(
    tmp_path: Path, content: str, regression: bool
) -> None:
    with pytest.raises(
        ValueError, match=r"train.tsv: the first line is not a header: '(pos|0.5)' is a label; give each"
    ):
        read(tmp_path, content, header=True, regression=regression)


HEADER = "; if the first line names the columns, pass --header"


@pytest.mark.parametrize("others", [[], ["a", "b"], ["label", "a", "b", "b"]])
def test_a_header_that_was_not_asked_for_is_no_class(others: list[str]) -> None:
    train = of("train", "label", "a", "b", "b", "a")
    files = [of("valid", *others)] if others else []
    message = "train, line 1: no other text has the label 'label'; correct or remove the line, or pass --allow-single-l"
    with pytest.raises(ValueError, match=rf"{message}abels{HEADER}$"):
        check_same_kind(train, files, regression=False)
    check_same_kind(train, files, regression=False, allow_single=True)
    check_same_kind(of("train", "a", "a", "b"), [of("valid", "a", "b")], regression=False)


def test_a_label_that_occurs_once_is_named(tmp_path: Path) -> None:
    train = of("train", "a", "a", "bb", "b", "b")
    with pytest.raises(ValueError, match=r"train, line 3: no other text has the label 'bb'; .*--allow-single-labels$"):
        check_same_kind(train, [of("valid", "a", "b")], regression=False)
    with pytest.raises(ValueError, match=rf"valid has labels that train lacks: label{HEADER}"):
        check_same_kind(of("train", "a", "b"), [of("valid", "label", "a", "b")], regression=False)
    with pytest.raises(ValueError, match=rf"line 1: 'score' is not a finite number, as scores are{HEADER}"):
        read(tmp_path, "score\ttext\n0.5\tx\n", regression=True)


def test_a_byte_order_mark_is_not_a_part_of_a_label(tmp_path: Path) -> None:
    path = tmp_path / "marked.tsv"
    path.write_text("pos\tgood\r\nneg\tbad\r\npos\tfine\r\n", encoding="utf-8-sig")
    assert read_labelled_texts(path).labels == ("pos", "neg", "pos")


def test_a_header_that_stands_twice_is_no_class(tmp_path: Path) -> None:
    train = read(tmp_path, "label\ttext\n0\ta\n1\tb\nlabel\ttext\n0\tc\n1\td\n")
    with pytest.raises(ValueError, match=rf"train\.tsv, line 1: no other text has the label 'label'.*{HEADER}$"):
        check_same_kind(train, [], regression=False)
    with pytest.raises(ValueError, match=r"train\.tsv, line 4 repeats the header; remove the line"):
        read(tmp_path, "label\ttext\n0\ta\n1\tb\nlabel\ttext\n", header=True)


def test_minus_one_is_no_class(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.tsv, line 2: the label -1 stands for an unknown label in the files"):
        read(tmp_path, "0\ta\n-1\tb\n1\tc\n")
    item = {"premise": "a", "hypothesis": "b", "label": -1}
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: the label -1 stands for"):
        read(tmp_path, json.dumps(item), "x.jsonl")
    assert read(tmp_path, "0\ta\n-1\tb\n", regression=True).labels == ("0", "-1")


def test_labels_that_look_alike_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    train = of("train", "Pos", "pos", "neg", "neg", "pos", "Pos", "neg")
    check_same_kind(train, [], regression=False)
    assert caplog.messages == ["train: the labels 'Pos', 'pos' look alike, but count as 2 classes"]
    assert train.label_counts() == "neg 3, Pos 2, pos 2"
    caplog.clear()
    check_same_kind(of("train", "1", "1.0"), [], regression=True)
    assert caplog.messages == []


def test_texts_with_two_labels_and_texts_to_train_and_test_on_are_said(tmp_path, caplog):
    train = read(tmp_path, "a\tgood film\nb\tgood film\na\tfine\nb\tbad\na\tgood film\n", "train.tsv")
    test = read(tmp_path, "b\tfine\na\ta new one\n", "test.tsv")
    check_same_kind(train, [test], regression=False)
    assert caplog.messages == [
        f"{tmp_path}/test.tsv: 50% of its lines are in the training text, too (most of them in {tmp_path}/train.tsv): "
        "what is measured on it says little about other text",
        f"{tmp_path}/train.tsv, line 2 has the label 'b', and line 1, the same text, 'a'; 1 of 5 texts contradict "
        "another",
    ]
    caplog.clear()
    check_same_kind(train, [], regression=True)  # two people give one text two scores
    assert caplog.messages == []
