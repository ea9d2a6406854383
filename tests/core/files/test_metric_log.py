"""Figures of a training in the files of TensorBoard and of Weights & Biases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlsm_plugin.core.files.metric_log import MetricLog
from tests.tensorboard_files import scalars


def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    with MetricLog(str(tmp_path / "board")).opened() as write:
        write({"dead": 3, "l0": 1.5}, 10)
        write({"dead": 2, "l0": 1.25}, 20)
    assert scalars(tmp_path / "board") == {"dead": {10: 3, 20: 2}, "l0": {10: 1.5, 20: 1.25}}


def test_nothing_is_written_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MetricLog().opened() as write:
        write({"dead": 3}, 10)
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with MetricLog(wandb_project="saes").opened() as write:
        write({"dead": 3, "explained_variance": 0.75}, 10)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert all(word in content for word in (b"saes", b"dead", b"explained_variance", b"0.75"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as Python has it where an import fails
    with (
        pytest.raises(ValueError, match="needs the package wandb: pip install wandb"),
        MetricLog(None, "saes").opened(),
    ):
        pass
