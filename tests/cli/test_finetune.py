"""``mlsm finetune``: the table of its results, and files and options that are refused before it trains."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import pytest

from mlsm_plugin import hub
from mlsm_plugin.cli.finetune import needs_fairseq, table
from tests.conftest import failing_mlsm
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


def labelled(folder: Path) -> tuple[object, ...]:
    for name in ("train", "valid"):
        lines = "long one\tA name and a value.\nshort\tA name.\nlong one\tA value and a name.\nshort\tA value.\n"
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8")
    return ("--train", folder / "train.tsv", "--valid", folder / "valid.tsv")


def test_table_has_a_row_for_each_seed() -> None:
    results = [{"seed": 1, "valid_accuracy": 0.5, "test_f1": 1}, {"seed": 12, "valid_accuracy": 0.75, "test_f1": 0}]
    figures = {"mean": {"valid_accuracy": 0.625, "test_f1": 0.5}, "deviation": {"valid_accuracy": 0.1768, "test_f1": 1}}
    assert table({"seeds": results, **figures}).splitlines() == [
        "     seed  valid accuracy  test f1",
        "        1          0.5000   1.0000",
        "       12          0.7500   0.0000",
        "     mean          0.6250   0.5000",
        "deviation          0.1768   1.0000",
    ]


def test_numbers_have_to_be_positive(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    words = ("finetune", "--checkpoint", tiny.model, *labelled(tmp_path), "--output", tmp_path / "out")
    for option in ("--max-epoch", "--patience", "--lr", "--batch-size"):
        assert f"{option} must be positive, got 0" in failing_mlsm(capsys, *words, option, 0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("train", "valid", "message"),
    [
        ("a\tx\nb\n", "a\tx\n", r"train.tsv, line 2 has 1 columns; expected label, text"),
        ("a\tx\nb\ty\n", "a\tx\nc\ty\n", r"valid.tsv has labels that .*train.tsv lacks: c$"),
        ("label\ttext\na\tx\nb\ty\n", "a\tx\nb\ty\n", r"train.tsv, line 1: no other text has the label 'label'"),
        ("a\tx\nb\ty\nb\tz\na\t\u200b\n", "a\tx\n", r"train.tsv, line 4: the text '\\u200b' has no tokens"),
        (
            "a\tthe\nb\ta\nb\tthe\na\ta\n",
            "a\t\u4e30\n",
            r"% of the characters of .*valid.tsv are unknown, above the .* '\u4e30' U\+4E30",
        ),
        ("a\tx\nb\ty\n", "a\tx\ty\n", r"valid.tsv has 2 texts in a line, .*train.tsv has 1"),
        ("a\tx\na\ty\n", "a\tx\n", r"train.tsv has only one label \(a\)"),
    ],
)
def test_files_that_cannot_be_learned_from_are_refused(
    tiny: TinyData, tmp_path: Path, capsys: Capture, train: str, valid: str, message: str
) -> None:
    (tmp_path / "train.tsv").write_text(train, encoding="utf-8")
    (tmp_path / "valid.tsv").write_text(valid, encoding="utf-8")
    pair = ("--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv")
    words = ("finetune", "--checkpoint", tiny.model, *pair, "--output", tmp_path / "out")
    assert re.search(message, failing_mlsm(capsys, *words))
    assert not (tmp_path / "out").exists()


def test_f1_is_of_the_labels_0_and_1(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    words = ("finetune", "--checkpoint", tiny.model, "--output", tmp_path / "out", "--metric", "f1")
    message = "train.tsv: --metric f1 needs the labels 0 and 1, without --regression"
    assert message in failing_mlsm(capsys, *words, *labelled(tmp_path))
    for name in ("train", "valid"):
        (tmp_path / f"{name}.tsv").write_text("0\tA name.\n1\tA value.\n0\tOne.\n1\tAll.\n", encoding="utf-8")
    files = ("--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv")
    assert message in failing_mlsm(capsys, *words, *files, "--regression")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("--fp16",), "--fp16 is not an option: flags are no longer handed to fairseq-train; pass --bf16 on"),
        (("--attention-dropout", "0.2"), "--attention-dropout is not an option: .*; pass --dropout"),
        (("--update-freq=2",), "--update-freq is not an option: .*; pass --batch-size"),
        (("--num-workers", "0"), "--num-workers is not an option: .*; `mlsm finetune --help` lists all options"),
    ],
)
def test_flags_of_fairseq_train_are_refused_with_what_replaces_them(
    tiny: TinyData, tmp_path: Path, capsys: Capture, flags: tuple[str, ...], advice: str
) -> None:
    words = ("finetune", "--checkpoint", tiny.model, *labelled(tmp_path), "--output", tmp_path / "out")
    assert re.search(advice, failing_mlsm(capsys, *words, *flags))
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path, capsys: Capture) -> None:
    words = ("finetune", *labelled(tmp_path), "--output", tmp_path / "out", "--model", "some-model")
    assert "some-model does not exist; a model on the hub is hf:some-model" in failing_mlsm(capsys, *words)


def test_fairseq_is_needed_for_its_checkpoints_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not needs_fairseq(argparse.Namespace(model=str(tmp_path)))
    assert not needs_fairseq(argparse.Namespace(model="hf:some-model"))
    assert needs_fairseq(argparse.Namespace(model=str(tmp_path / "model.pt")))


def test_what_cannot_be_fine_tuned_is_refused(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    words = ("finetune", *labelled(tmp_path), "--output", tmp_path / "out")
    line = failing_mlsm(capsys, *words, "--checkpoint", tiny.model, "--regression")
    assert "train.tsv, line 1: 'long one' is not a finite number, as scores are" in line
    (tmp_path / "bare").mkdir()
    shutil.copy(tiny.model, tmp_path / "bare" / "model.pt")
    assert "has no dict.txt" in failing_mlsm(capsys, *words, "--checkpoint", tmp_path / "bare")
    assert "--seeds names a seed twice: 1 1" in failing_mlsm(
        capsys, *words, "--checkpoint", tiny.model, "--seeds", 1, 1
    )
    with pytest.raises(ValueError, match="this model has no classification head: fine-tune it with `mlsm finetune`"):
        hub.from_pretrained(tiny.model).predict_label("text")
