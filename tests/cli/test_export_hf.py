"""``mlsm convert``: what it says when it is done, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def test_the_latent_head_of_an_earlier_export_is_removed(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    head = tmp_path / "out" / "latent_head.safetensors"
    head.parent.mkdir()
    head.touch()
    words = ("convert", tiny.model, head.parent, "--text", tiny.text, "--lines")
    failing_mlsm(capsys, *words, 0)
    assert head.exists()
    mlsm(*words, 5)
    assert (head.parent / "model.safetensors").exists()
    assert not head.exists()


def test_what_cannot_be_compared_is_refused(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    words = ("convert", tiny.model, tmp_path / "out", "--text")
    assert "--lines must be positive, got 0" in failing_mlsm(capsys, *words, tiny.text, "--lines", 0)
    assert str(tmp_path / "absent.txt") in failing_mlsm(capsys, *words, tmp_path / "absent.txt")
    assert list(tmp_path.iterdir()) == []
