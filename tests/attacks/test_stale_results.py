"""No result is taken for current after what it was made from, or what was made, has changed under the same name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mlsm_plugin.cli.main import main
from mlsm_plugin.core.files.atomic_files import read_json
from tests.attacks.commands import SMALL
from tests.attacks.test_killed_commands import TRAINING
from tests.conftest import TINY_MODEL, TINY_TRAINING, failing_mlsm, mlsm
from tests.earlier_records import in_earlier_files
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]
Words = tuple[object, ...]


def copied(tiny: TinyData, folder: Path) -> TinyData:
    """Copies of all files, to change."""
    for name in ("tokenizer", "data-bin", "model"):
        shutil.copytree(tiny.text.parent / name, folder / name)
    shutil.copyfile(tiny.text, folder / "text.txt")
    return TinyData(
        folder / "text.txt", folder / "tokenizer", folder / "data-bin", folder / "model" / "checkpoint_last.pt"
    )


def other_weights(checkpoint: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    for weight in state["model"].values():
        weight.mul_(0.5)
    torch.save(state, checkpoint)


def more_text(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8") + "a\tName the name.\n", encoding="utf-8")


def finetune(own: TinyData, output: Path) -> Words:
    train = own.text.parent / "train.tsv"
    if not train.exists():
        rows = "a\tThe name is bound.\nb\tNames are bound.\na\tA name is used.\nb\tNames are used.\n"
        train.write_text(rows * 2, encoding="utf-8")
        shutil.copyfile(train, train.with_name("valid.tsv"))
    files = ("--train", train, "--valid", train.with_name("valid.tsv"))
    return ("finetune", "--checkpoint", own.model, *files, "--output", output, "--max-epoch", 1, "--cpu")


CHANGES: dict[str, Callable[[TinyData], None]] = {
    "files.train": lambda own: more_text(own.text.parent / "train.tsv"),
    "files.valid": lambda own: more_text(own.text.parent / "valid.tsv"),
    "model": lambda own: other_weights(own.model),
}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_finetune_notices_files_with_other_contents(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    own = copied(tiny, tmp_path / "own")
    mlsm(*finetune(own, tmp_path / "out"))
    for changed, change in CHANGES.items():
        kept = shutil.copytree(own.text.parent, tmp_path / changed)
        change(own)
        for more in ((), ("--seeds", 1, 2)):
            line = failing_mlsm(capsys, *finetune(own, tmp_path / "out"), *more)
            assert f"was begun with other settings: {changed} is " in line
            assert "choose another --output" in line
        shutil.rmtree(own.text.parent)
        shutil.copytree(kept, own.text.parent)
    shutil.move(own.text.parent, tmp_path / "moved")  # names do not count
    moved = TinyData(*(tmp_path / "moved" / path.relative_to(own.text.parent) for path in vars(own).values()))
    capsys.readouterr()
    mlsm(*finetune(moved, tmp_path / "out"))
    assert "training" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_a_mistyped_value_does_not_refuse_the_right_one(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    own = copied(tiny, tmp_path / "own")
    words = finetune(own, tmp_path / "out")
    assert "the loss is not finite" in failing_mlsm(capsys, *words, "--lr", "1e30")
    mlsm(*words)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_auxiliary_refuses_other_data_of_the_same_vocabulary(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    own = copied(tiny, tmp_path / "own")
    words = ("auxiliary", own.data_bin, "--save-dir", tmp_path / "run", "--max-update", 2, *TINY_MODEL, *TINY_TRAINING)
    mlsm(*words)
    record = in_earlier_files(tmp_path / "run", "data")
    mlsm(*words, "--max-update", 3)
    assert read_json(tmp_path / "run" / "steps.json") == record
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    own.text.write_text("".join(reversed(own.text.read_text().splitlines(keepends=True))))
    texts = ("--train", own.text, "--valid", own.text)
    mlsm("binarize", "--tokenizer", own.tokenizer, *texts, "--output", own.data_bin)
    line = failing_mlsm(capsys, *words, "--max-update", 4)
    assert "was begun with other settings: train is " in line
    assert "choose another --save-dir" in line.lower()
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_inspect_refuses_codes_of_another_text(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    own = copied(tiny, tmp_path / "own")
    learn = ("dictionary", own.data_bin, "--auxiliary", own.model, "--layer", 1, "--output", tmp_path / "dictionary")
    mlsm(*learn, *SMALL)
    code = ("encode", own.data_bin, "--auxiliary", own.model, "--dictionary", tmp_path / "dictionary")
    mlsm(*code, "--splits", "valid", "--threads", 1)
    mlsm("inspect", own.data_bin, "--split", "valid", "--output", tmp_path / "page.html")
    own.text.write_text("".join(reversed(own.text.read_text().splitlines(keepends=True))))
    codes = shutil.copytree(own.data_bin / "valid.codes", tmp_path / "codes")
    texts = ("--train", own.text, "--valid", own.text)
    mlsm("binarize", "--tokenizer", own.tokenizer, *texts, "--output", own.data_bin)
    if not (own.data_bin / "valid.codes").exists():
        shutil.copytree(codes, own.data_bin / "valid.codes")
    line = failing_mlsm(capsys, "inspect", own.data_bin, "--split", "valid", "--output", tmp_path / "page.html")
    assert "were made from another dataset" in line


def states(output: str) -> list[str]:
    """Name and state of each step in the table that preprocess prints last."""
    rows = [line.split() for line in output.splitlines() if " s" in line and "  " in line]
    return [f"{row[0]} {row[1]}" for row in rows if row[1:2] and row[1] in ("current", "done")]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_preprocess_notices_what_was_replaced_deleted_or_emptied(
    tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    own = copied(tiny, tmp_path / "own")
    output = tmp_path / "run"
    words = (
        *("preprocess", "--train", own.text, "--valid", own.text, "--output", output, "--tokenizer", own.tokenizer),
        *("--auxiliary-updates", 2, "--auxiliary-arch", "mlsm_roberta_tiny", "--tokens-per-sample", 64),
        *(*SMALL[:6], "--threads", 1, *TINY_MODEL[2:], *TINY_TRAINING, *TRAINING),
    )

    def rerun() -> list[str]:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        return states(capsys.readouterr().out)

    first = rerun()
    assert first == ["binarize done", "auxiliary done", "dictionary done", "encode done"]
    codes = json.loads((output / "data-bin" / "train.codes" / "meta.json").read_text())
    assert rerun() == [step.replace("done", "current") for step in first]
    for shard in (output / "data-bin" / "train.codes").glob("*"):
        shard.unlink()
    assert rerun() == [*(step.replace("done", "current") for step in first[:3]), "encode done"]
    assert json.loads((output / "data-bin" / "train.codes" / "meta.json").read_text()) == codes
    (output / "data-bin" / "train.bin").unlink()
    assert rerun() == first
    assert (output / "data-bin.old" / "train.codes").is_dir()
    mlsm("tokenizer", "--input", own.text, "--vocab-size", 190, "--output", own.tokenizer)
    assert rerun() == first
    assert (output / "data-bin.old2").is_dir()
