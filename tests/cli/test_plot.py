"""``mlsm plot``: a picture of the curves of logs in fairseq's two formats."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from mlsm_plugin.cli.plot import run_names
from tests.conftest import failing_mlsm, mlsm

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four updates in both formats, and in a folder a run that was stopped after two of them."""
    root = tmp_path_factory.mktemp("logs")
    found = {"simple": root / "simple.log", "json": root / "json.log", "stopped": root / "stopped"}
    found["stopped"].mkdir()
    simple, json_lines = [], []
    for update in (1, 2, 3, 4):
        values = {"loss": 5 - update / 2, "kl": 3 - update / 3, "num_updates": update, "lr": 1e-3, "gnorm": 1 / update}
        shown = ", ".join(f"{name}={value:.4g}" for name, value in values.items())
        where = "2026-01-01 00:00:00 | INFO |"
        simple.append(f"{where} train_inner | epoch 001:      {update} / 10 {shown}")
        json_lines.append(f"{where} train_inner | {json.dumps({name: str(value) for name, value in values.items()})}")
        if update % 2 == 0:
            numbers = f"loss 4.5 | kl {3 / update} | num_updates {update}"
            simple.append(f"{where} valid | epoch 001 | valid on 'valid' subset | {numbers}")
            valid = {"epoch": 1, "valid_loss": "4.5", "valid_kl": str(3 / update), "valid_num_updates": str(update)}
            json_lines.append(f"{where} valid | {json.dumps(valid)}")
    found["simple"].write_text("\n".join(simple), encoding="utf-8")
    found["json"].write_text("\n".join(json_lines), encoding="utf-8")
    (found["stopped"] / "train.log").write_text("\n".join([*simple[:3], *simple]), encoding="utf-8")
    return found


def colors_of(path: Path) -> int:
    with Image.open(path) as picture:
        assert picture.width > 300
        return len(picture.convert("RGB").getcolors(1 << 24))


def test_command_draws_a_picture(logs: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "new" / "curves"
    mlsm("plot", logs["simple"], logs["stopped"], logs["stopped"], "--output", output)
    assert re.search(r"curves\.png: 4 panels of 3 runs", capsys.readouterr().out)
    assert colors_of(tmp_path / "new" / "curves.png") > 100
    mlsm("plot", logs["json"], "--output", output, "--metrics", "kl", "--names", "a run with $x_{")
    assert "3 panels of 1 runs" in capsys.readouterr().out
    assert colors_of(tmp_path / "new" / "curves.png") > 100
    assert [path.name for path in output.parent.iterdir()] == ["curves.png"]


def test_image_may_be_named_with_its_ending_and_a_metric_twice(
    logs: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    mlsm("plot", logs["json"], "--output", tmp_path / "curves.png", "--metrics", "kl", "kl")
    assert "curves.png: 3 panels of 1 runs" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_runs_with_logs_of_one_name_are_told_apart(logs: dict[str, Path]) -> None:
    assert run_names(["a/train.log", "b/kl.log"], [Path("a/train.log"), Path("b/kl.log")]) == ["train", "kl"]
    assert run_names(["a/train.log", "b/train.log"], [Path("a/train.log"), Path("b/train.log")]) == [
        "a/train.log",
        "b/train.log",
    ]
    assert run_names([str(logs["stopped"])], [logs["stopped"] / "train.log"]) == ["stopped"]


def test_what_cannot_be_drawn_is_refused(logs: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "other.log").write_text("nothing\n{broken\n", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    words = ("plot", "--output", tmp_path / "curves")
    for run, message in (
        (tmp_path / "other.log", "holds no progress of fairseq-train"),
        (tmp_path / "empty", r"has no \*.log; keep the output of fairseq-train"),
        (tmp_path / "none", "does not exist; pass the log"),
        (logs["simple"].parent, "has several logs, pass one of them: json.log, simple.log"),
    ):
        assert re.search(message, failing_mlsm(capsys, *words, run))
    assert "no run has logged nosuch" in failing_mlsm(capsys, *words, logs["json"], "--metrics", "nosuch")
    assert "--names has 2 names for 1 runs" in failing_mlsm(capsys, *words, logs["json"], "--names", "a", "b")
    for output in ("", f"{tmp_path}/"):
        assert "names no image" in failing_mlsm(capsys, "plot", logs["json"], "--output", output)
    for dpi in (1, 100_000):
        assert "--dpi must be between" in failing_mlsm(capsys, *words, logs["json"], "--dpi", dpi)
    assert not list(tmp_path.glob("curves*"))
