"""What a pre-training in stages decides from the flags of its training; ``tests/cli/test_pretrain.py`` has the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.fairseq_plugin.pipelines.pretraining import separate_words
from mlsm_plugin.fairseq_plugin.pipelines.self_coded_pretraining import coded_splits, in_half_precision
from tests.tiny_models import TinyData


def test_splits_that_are_validated_on_are_coded(tiny: TinyData, tmp_path: Path) -> None:
    data = str(tiny.copy(tmp_path / "data"))
    for name, expected in {"valid": ["valid"], "valid,test": ["valid", "test"]}.items():
        assert coded_splits(data, ["--cpu", "--valid-subset", name]) == ["train", *expected]
    assert coded_splits(data, ["--train-subset", "train"]) == ["train", "valid"]
    (tmp_path / "data" / "valid1.idx").touch()
    assert coded_splits(data, ["--combine-valid-subsets"]) == ["train", "valid", "valid1"]


def test_precision_and_device_are_those_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mlsm_plugin.fairseq_plugin.pipelines.self_coded_pretraining.has_fast_bf16", lambda device: True
    )
    for flags, expected in ((["--cpu"], True), (["--autocast=bf16"], True), (["--autocast=off"], False)):
        assert in_half_precision(None, separate_words(flags)) is expected
