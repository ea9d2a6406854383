"""``mlsm convert``: from a run to a checkpoint that all commands take."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import updates_of
from tests.conftest import Pipeline, failing_mlsm, fairseq_train, mlsm
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


def test_wrong_usage_is_one_line(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    words = ("convert", tiny.model.parent, tmp_path / "averaged.pt")
    same = ("convert", tiny.model, tiny.model, tmp_path / "averaged.pt")
    assert "averaging needs two or more checkpoints" in failing_mlsm(capsys, *same)
    assert "--last must be positive, got 0" in failing_mlsm(capsys, *words, "--last", 0)
    assert "of 0 different updates, fewer than 2" in failing_mlsm(capsys, *words, "--last", 2)
    assert "--last takes the folder of one run" in failing_mlsm(capsys, *same, "--last", 2)
    assert "is a folder; name a file in it" in failing_mlsm(capsys, "convert", tiny.model.parent, tmp_path, "--last", 2)
    assert "--text is not for several checkpoints" in failing_mlsm(capsys, *same, "--text", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_if_asked(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    run = shutil.copytree(tiny.model.parent, tmp_path / "run")
    words = ("convert", run / "checkpoint_last.pt", run / "other.pt", run / "averaged.pt")
    for name in ("other.pt", "averaged.pt"):
        shutil.copy(run / "checkpoint_last.pt", run / name)
    torch.save({}, run / "averaged.pt")
    line = failing_mlsm(capsys, *words)
    assert f"{run}/averaged.pt exists already; name a new file, or pass --overwrite to replace it" in line
    assert torch.load(run / "averaged.pt") == {}
    mlsm(*words, "--overwrite")
    assert updates_of(run / "averaged.pt") == 0


@pytest.mark.slow
def test_an_averaged_checkpoint_is_one_like_any_other(pipeline: Pipeline, tmp_path: Path, capsys: Capture) -> None:
    run, output = tmp_path / "run", tmp_path / "mean" / "averaged.pt"
    steps = ("--save-interval-updates", 2, "--keep-interval-updates", 3, "--max-update", 8, "--mlm-weight", 1)
    fairseq_train(pipeline.data_bin, run, *steps, "--disable-validation")
    output.parent.mkdir()
    capsys.readouterr()
    mlsm("convert", run, output, "--last", 3)
    assert capsys.readouterr().out == f"{output}: the mean of 3 checkpoints, of updates 4, 6, 8\n"
    mlsm("convert", output.parent, tmp_path / "exported", "--text", pipeline.valid_text, "--lines", 5)
    dictionary = ("--layer", 1, "--atoms", 4, "--tokens", 300, "--iterations", 2, "--tokens-per-sample", 32)
    mlsm(
        "dictionary", pipeline.data_bin, "--auxiliary", output.parent, *dictionary, "--output", tmp_path / "dictionary"
    )
    for number, flags in enumerate((("--finetune-from-model", output), ("--restore-file", output))):
        more = tmp_path / f"more{number}"
        fairseq_train(pipeline.data_bin, more, *flags, "--max-update", 10, "--mlm-weight", 1, "--disable-validation")
        assert updates_of(more / "checkpoint_last.pt") == 10
