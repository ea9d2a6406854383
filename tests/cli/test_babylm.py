"""``mlsm babylm``: its options; ``tests/babylm`` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.cli.main import build_parser
from tests.conftest import failing_mlsm


def test_only_training_hands_flags_on(tmp_path: Path) -> None:
    parser = build_parser("babylm")
    args, extra = parser.parse_known_args(["babylm", "train", "text", "--output", str(tmp_path), "--lr", "1e-3"])
    assert (args.takes_extra, extra, args.track, args.vocab_size) == (True, ["--lr", "1e-3"], "strict-small", 16_000)
    for action in (["check", "run"], ["push", "run", "a/b"]):
        assert not parser.parse_args(["babylm", *action]).takes_extra


def test_a_folder_without_a_ledger_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no ledger.json; pass the --output of" in failing_mlsm(capsys, "babylm", "check", tmp_path)
    assert "has no ledger.json" in failing_mlsm(capsys, "babylm", "push", tmp_path, "a/b", "--dry-run")


def test_options_that_would_do_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("babylm", "train", tmp_path, "--output", tmp_path / "run")
    line = failing_mlsm(capsys, *command, "--objective", "mlm", "--atoms", 500)
    assert "--atoms: only --objective mlsm+mlm makes codes" in line
