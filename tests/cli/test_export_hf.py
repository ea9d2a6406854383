"""``mlsm convert``: what it says when it is done, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.conftest import failing_mlsm, mlsm
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


def test_command_says_what_it_proved(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    mlsm("convert", tiny.model, tmp_path / "out", "--text", tiny.text, "--lines", 40)
    printed = capsys.readouterr().out
    found = re.search(r"ids are the same on 40 lines, logits of ([\d,]+) tokens differ by at most (\S+)", printed)
    assert found is not None
    assert int(found.group(1).replace(",", "")) > 400
    assert 0 <= float(found.group(2)) <= 1e-4
    masked = re.search(r"ids are the same on (\d+) of these lines with a mask, too", printed)
    assert masked is not None
    assert int(masked.group(1)) > 150
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}


def test_another_model_is_replaced_only_if_asked(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    words = ("convert", tiny.model, output, "--text", tiny.text, "--lines", 5)
    output.mkdir()
    (output / "README.md").write_text("a card", encoding="utf-8")
    mlsm(*words)
    written = {path.name: path.read_bytes() for path in output.iterdir()}
    mlsm(*words)  # the same again
    assert {path.name: path.read_bytes() for path in output.iterdir()} == written
    left_over = {"special_tokens_map.json": {"mask_token": "the"}, "added_tokens.json": {"[new]": 3}}
    for name, content in left_over.items():
        (output / name).write_text(json.dumps(content), encoding="utf-8")
        line = failing_mlsm(capsys, *words)
        assert f"{output} holds another model already ({name}); name a new folder, or pass --overwrite" in line
        (output / name).unlink()
    (output / "config.json").write_text("{}", encoding="utf-8")
    (output / "latent_head.safetensors").touch()
    assert "holds another model already (config.json)" in failing_mlsm(capsys, *words)
    for name, content in left_over.items():
        (output / name).write_text(json.dumps(content), encoding="utf-8")
    mlsm(*words, "--overwrite")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == written
    assert AutoTokenizer.from_pretrained(output).mask_token == "<mask>"


def test_the_folder_of_something_else_stays_as_it_is(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    run = shutil.copytree(tiny.model.parent, tmp_path / "run")
    before = sorted(path.name for path in run.iterdir())
    for more in ((), ("--overwrite",)):
        line = failing_mlsm(capsys, "convert", tiny.model, run, "--text", tiny.text, *more)
        assert f"{run} holds files that do not belong to a model, such as checkpoint_last.pt; name a new folder" in line
    assert sorted(path.name for path in run.iterdir()) == before


def test_what_cannot_be_compared_is_refused(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    words = ("convert", tiny.model, tmp_path / "out", "--text")
    assert "--lines must be positive, got 0" in failing_mlsm(capsys, *words, tiny.text, "--lines", 0)
    assert str(tmp_path / "absent.txt") in failing_mlsm(capsys, *words, tmp_path / "absent.txt")
    assert list(tmp_path.iterdir()) == []
