"""``mlsm npm classify``: the accuracy and the predictions, by retrieval and by the masked-LM head."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import failing_mlsm, mlsm
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("parametric", [False, True])
def test_command_prints_the_accuracy_and_writes_predictions(
    npm: Path, tiny: TinyData, tmp_path: Path, capsys: Capture, parametric: bool
) -> None:
    verbalizer, texts = tmp_path / "v.tsv", tmp_path / "i.tsv"
    verbalizer.write_text("a\tthe, the target\nb\tis, value\n", encoding="utf-8")
    texts.write_text("a\tA name.\nb\tAnother name.\na\tA third.\n", encoding="utf-8")
    checkpoint = tiny.model if parametric else npm
    how = ("--parametric",) if parametric else ("--datastore", npm.parent / "store")
    words = ("npm", "classify", "--checkpoint", checkpoint, *how, "--verbalizer", verbalizer, "--input", texts)
    mlsm(*words, "--template", "{} It was <mask>.", "--output", tmp_path / "out.tsv")
    output = capsys.readouterr().out
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text(encoding="utf-8").splitlines()]
    assert [row[2] for row in rows] == ["A name.", "Another name.", "A third."]
    assert all(0.5 <= float(row[1]) <= 1 for row in rows)
    correct = sum(row[0] == label for row, label in zip(rows, "aba", strict=True))
    assert f"accuracy {correct / 3:.4f} ({correct} of 3; always the most frequent label: 0.6667)" in output
    for path in (texts, verbalizer):
        line = failing_mlsm(capsys, *words, "--template", "{} It was <mask>.", "--output", path)
        assert f"{path} is the output and also an input" in line
    if parametric:
        line = failing_mlsm(capsys, *words, "--template", "{} It was <mask>.", "--max-occurrences", 5)
        assert "--max-occurrences is only allowed with --datastore" in line
    for template in ("It was <mask>.", "{} It was.", "{} {} <mask>"):
        assert "--template needs {} and <mask>, once each" in failing_mlsm(capsys, *words, "--template", template)


def test_texts_that_need_a_word(
    tiny: TinyData, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "v.tsv").write_text("a\tthe, the target\nb\tis, value\n", encoding="utf-8")
    texts = tmp_path / "i.tsv"
    words = ("npm", "classify", "--checkpoint", tiny.model, "--verbalizer", tmp_path / "v.tsv", "--input", texts)
    words += ("--template", "{} It was <mask>.", "--parametric")
    texts.write_text("\nlabel\ttext\na\tA name.\n" + "b\t" + "the value of it " * 60 + "\n", encoding="utf-8")
    line = failing_mlsm(capsys, *words)
    assert (
        "i.tsv, line 2: label 'label' is not in the verbalizer (a, b); if it names the columns, pass --header" in line
    )
    mlsm(*words, "--header")
    printed = capsys.readouterr()
    assert " of 2; always the most frequent label" in printed.out
    assert "1 of 2 texts are longer than the model's positions and are cut around the mask" in printed.err
    texts.write_text("A name.\n\u200b\n", encoding="utf-8")
    assert "i.tsv, line 2: the text '\\u200b' has no tokens after normalization" in failing_mlsm(capsys, *words)
    texts.write_text("A name.\nthe \u4e30\n", encoding="utf-8")
    wanted = f"% of the texts (each of them more than 10%) of {texts} are unknown, above the limit of 1.00%"
    assert wanted in failing_mlsm(capsys, *words)
    mlsm(*words, "--max-unk-rate", 0.5)
    assert "unknown characters: '\u4e30' U+4E30 (1 times)" in caplog.text


def test_classifying_needs_a_datastore_or_the_head(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    words = ("--verbalizer", tmp_path / "v.tsv", "--input", tmp_path / "i.tsv", "--template", "{} <mask>")
    for ways in ((), ("--datastore", tmp_path, "--parametric")):
        line = failing_mlsm(capsys, "npm", "classify", "--checkpoint", tiny.model, *words, *ways)
        assert "pass either --datastore, to retrieve, or --parametric" in line


def test_a_head_that_was_not_trained_does_not_classify(npm: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "v.tsv").write_text("a\tthe\nb\tof\n")
    (tmp_path / "i.tsv").write_text("a\tthe value\n")
    words = ("--verbalizer", tmp_path / "v.tsv", "--input", tmp_path / "i.tsv", "--template", "{} <mask>")
    message = failing_mlsm(capsys, "npm", "classify", "--checkpoint", npm.parent, *words, "--parametric")
    assert (
        "was not trained (--task nonparametric_masked_lm has no loss on it): --parametric needs a masked LM" in message
    )
