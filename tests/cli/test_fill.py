"""``mlsm npm fill``: the phrases of each mask with their sources, and texts that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.cli.main import main
from tests.conftest import failing_mlsm, mlsm

Capture = pytest.CaptureFixture[str]

TEXT = "The <mask> is called with one argument."


def test_command_prints_phrases_and_sources(npm: Path, capsys: Capture) -> None:
    where = ("--checkpoint", npm.parent, "--datastore", npm.parent / "store")
    mlsm("npm", "fill", TEXT, "No <mask> and no <mask>.", *where, "--topk", 2, "--contexts", 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "mask " in line] == ["  mask 1", "  mask 1", "  mask 2"]
    assert sum("[[" in line for line in lines) == 6
    mlsm("npm", "fill", "The value", *where, "--continue", 2)
    assert capsys.readouterr().out.startswith("The value ")
    long_text = "the value of it " * 60 + "<mask>"
    mlsm("npm", "fill", long_text, *where, "--topk", 1)
    cut = "1 of 1 texts are longer than the model's positions and are cut around the mask"
    assert cut in capsys.readouterr().err
    mlsm("npm", "fill", "the value of it " * 60, "The value", *where, "--continue", 1)
    assert cut.replace("of 1", "of 2") in capsys.readouterr().err
    assert main(["npm", "fill", TEXT, "nothing", *map(str, where)]) == 1
    printed = capsys.readouterr()
    assert "the text has no <mask>" in printed.err
    assert TEXT not in printed.out
    words = ("npm", "fill", "The value", *where, "--continue", 1, "--topk", 3, "--contexts", 1, "--context-tokens", 4)
    assert "--topk, --contexts, --context-tokens: not with --continue" in failing_mlsm(capsys, *words)
    assert "--topk: not with --continue" in failing_mlsm(capsys, *words[:-4])
    mlsm("npm", "fill", TEXT, *where, "--neighbors", 10**6)  # all keys of the store
    assert "  mask 1" in capsys.readouterr().out
    for option, value, wanted in (("--contexts", -1, "be at least 0"), ("--continue", -3, "not be negative")):
        message = f"{option} must {wanted}, got {value}"
        assert message in failing_mlsm(capsys, "npm", "fill", TEXT, *where, option, value)
    assert "--datastore is required" in failing_mlsm(capsys, "npm", "fill", TEXT, *where[:2])
