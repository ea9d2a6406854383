"""Kept models become folders, whose logits are those of the trained models."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from mlsm_plugin.babylm import exports
from mlsm_plugin.babylm.checks import problems_of
from mlsm_plugin.babylm.exports import export_kept, exporting
from mlsm_plugin.babylm.ledger import Ledger
from mlsm_plugin.babylm.training import _finished
from mlsm_plugin.core.files.atomic_files import read_json
from mlsm_plugin.fairseq_plugin.compat import checkpoint_states
from tests.babylm.made_run import make_run
from tests.tiny_models import TinyData


def test_each_kept_model_becomes_a_folder_and_goes(tiny: TinyData, tmp_path: Path) -> None:
    ledger = make_run(tiny, tmp_path, finished=False)
    assert Ledger.read(tmp_path) == ledger
    assert {name: own["words"] for name, own in ledger.checkpoints.items()} == {"chck_1K": 1200, "chck_2K": 2100}
    assert not list((tmp_path / "model" / "words").iterdir())
    export_kept(tmp_path, ledger, finished=True)
    assert ledger.checkpoints["main"]["words"] == ledger.seen == 2400
    assert len({own["sha256"] for own in ledger.checkpoints.values()}) == 3
    for name in ledger.checkpoints:
        trained = read_json(tmp_path / "checkpoints" / f"{name}.json")
        ids = torch.tensor(trained["ids"][: trained["length"]])
        model = AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoints" / name).eval()
        ids[trained["masked"]] = model.config.vocab_size - 1  # <mask>
        logits = model(ids[None]).logits[0, trained["masked"]]
        places = torch.linspace(0, len(logits) - 1, len(trained["logits"]), dtype=torch.float64).long()
        torch.testing.assert_close(logits[places], torch.tensor(trained["logits"]), rtol=0, atol=1e-4)


def test_the_last_model_is_exported_again_if_it_is_lost(tiny: TinyData, tmp_path: Path) -> None:
    ledger = make_run(tiny, tmp_path)
    first = ledger.checkpoints["main"]["sha256"]
    for name in ("main", "chck_1K"):
        shutil.rmtree(tmp_path / "checkpoints" / name)
    export_kept(tmp_path, ledger, finished=True)
    assert ledger.checkpoints["main"]["sha256"] == first
    (found,) = problems_of(tmp_path)
    assert found.startswith("chck_1K is missing; restore it")


def test_models_are_exported_while_a_run_trains(
    tiny: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "SECONDS_BETWEEN_LOOKS", 0.01)
    ledger = make_run(tiny, tmp_path, finished=False)
    again = tmp_path / "model" / "words" / "chck_2K.pt"
    with exporting(tmp_path, ledger):
        later = {**torch.load(tmp_path / "model" / "checkpoint_last.pt"), "task_state": {"words": 2300}}
        checkpoint_states.save_whole(later, again)  # as the trainer: a file is whole or absent
        deadline = time.monotonic() + 60
        while again.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert Ledger.read(tmp_path).checkpoints["chck_2K"]["words"] == 2300


def test_a_lost_ledger_is_said_and_not_called_complete(tiny: TinyData, tmp_path: Path) -> None:
    ledger = make_run(tiny, tmp_path / "run")
    ledger.checkpoints.clear()
    early = _finished(ledger, tmp_path / "run", None)
    assert early is not None
    assert early.startswith("the run has no chck_1K, chck_2K, which an earlier ledger.json had; restore both")
    lost = "is missing; restore it from a copy, or train in another --output"
    assert [problem for problem in problems_of(tmp_path / "run") if "missing" in problem] == [
        f"chck_1K {lost}",
        f"chck_2K {lost}",
    ]
