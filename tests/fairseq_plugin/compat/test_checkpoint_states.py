"""What a user gets for a file that is not a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import load_model, read_state, updates_of, weights_in
from tests.fairseq_plugin.compat.compat_checks import saved_checkpoint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"auxiliary checkpoint \S*none\.pt does not exist"):
        read_state(tmp_path / "none.pt", kind="auxiliary checkpoint")
    with pytest.raises(FileNotFoundError, match=r"checkpoint \S*none\.pt does not exist"):
        load_model(tmp_path / "none.pt", {})
    assert updates_of(tmp_path / "none.pt") == 0


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_text("no checkpoint")
    for load in (read_state, lambda path: load_model(path, {})):
        with pytest.raises(ValueError, match=r"checkpoint\.pt is not a readable fairseq checkpoint \(\w+"):
            load(path)
    torch.save({"cfg": None, "args": None}, path)
    with pytest.raises(ValueError, match="is not a readable fairseq checkpoint"):
        read_state(path)


def test_a_state_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_checkpoint(str(tmp_path))
    state = read_state(path)
    monkeypatch.setattr(torch, "load", None)
    model, _, _ = load_model(path, {}, state=state)
    weights = weights_in(state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
