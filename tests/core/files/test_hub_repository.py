"""What a push needs, and what it says; tests of ``mlsm adapt`` and ``mlsm babylm push`` push to a local hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from mlsm_plugin.core.files.hub_repository import check_can_push, push_branches


def test_names_and_users_are_checked_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("small", "a/b/c", "someone/a b", ""):
        with pytest.raises(ValueError, match="is no name of a repository: OWNER/NAME"):
            check_can_push(name, dry_run=True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="nobody is logged in to the hub; run `hf auth login`"):
        check_can_push("someone/small-0.1")
    check_can_push("someone/small-0.1", dry_run=True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_test")
    check_can_push("someone/small-0.1")


def test_a_dry_run_counts_files(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    lines = list(push_branches({"main": tmp_path}, "someone/small", dry_run=True))
    assert lines == ["main: 2 files, 0.0 MB would be pushed to someone/small"]
