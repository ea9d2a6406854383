"""The ledger is read back as it was written, and says what is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlsm_plugin.babylm.ledger import OF_AUXILIARY, OF_RUN, Ledger
from mlsm_plugin.babylm.settings import BabylmSettings
from mlsm_plugin.babylm.training import auxiliary_of, open_ledger

SMALL = BabylmSettings(track="custom", words="100", epochs=3)


def text_of(folder: Path, name: str, words: int) -> Path:
    (folder / name).write_text(f"{name} " * words + "\n", encoding="utf-8")
    return folder / name


def opened(folder: Path, *words: int) -> Ledger:
    files = [text_of(folder, f"{number}.txt", count) for number, count in enumerate(words)]
    return open_ledger(files, SMALL, None)


def test_a_ledger_is_read_back(tmp_path: Path) -> None:
    ledger = opened(tmp_path, 30, 20)
    ledger.checkpoints["chck_10"] = {"words": 12, "updates": 3, "sha256": "0"}
    ledger.seconds["training"] = 1.5
    ledger.write(tmp_path)
    assert Ledger.read(tmp_path) == ledger
    content = json.loads((tmp_path / "ledger.json").read_text(encoding="utf-8"))
    assert (content["words"], content["exposures"], content["planned"]) == (50, 0, 150)
    table = ledger.table()
    assert "all text" in table
    assert "0 words  of 150 in 3 epochs; the track leaves 300" in table
    assert "12 words  after 3 updates" in table


def test_the_words_of_an_auxiliary_model_count_once_and_its_exposures_all(tmp_path: Path) -> None:
    auxiliary = replace(opened(tmp_path, 30), seen=60)
    auxiliary.texts.append({"file": "other.txt", "words": 25, "sha256": "1", "of": OF_RUN})
    ledger = open_ledger([tmp_path / "0.txt"], SMALL, auxiliary)
    assert [(one["file"], one["of"]) for one in ledger.texts] == [("0.txt", OF_RUN), ("other.txt", OF_AUXILIARY)]
    assert (ledger.words, ledger.epochs, ledger.planned, ledger.exposures) == (55, 3, 90, 60)
    without_epochs = BabylmSettings(track="custom", words="100")
    seen_much = replace(auxiliary, seen=1000 - 45)
    assert open_ledger([tmp_path / "0.txt"], without_epochs, seen_much).epochs == 1
    with pytest.raises(
        ValueError, match="1 epochs of 30 words, after 980 of an auxiliary model, are more than the 1,0"
    ):
        open_ledger([tmp_path / "0.txt"], without_epochs, replace(auxiliary, seen=980))


def test_more_text_than_the_track_allows_is_refused(tmp_path: Path) -> None:
    assert opened(tmp_path, 60, 40).words == 100
    with pytest.raises(
        ValueError, match="the text has 101 words, including those of an auxiliary model, but the track"
    ):
        opened(tmp_path, 60, 41)


def test_a_damaged_or_missing_ledger_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no ledger.json; pass the --output of `mlsm babylm train`"):
        Ledger.read(tmp_path)
    with pytest.raises(ValueError, match=r"has no ledger.json, which says what it was trained on"):
        auxiliary_of(tmp_path / "checkpoint_last.pt")
    opened(tmp_path, 10).write(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no model yet"):
        auxiliary_of(tmp_path)
    path = tmp_path / "ledger.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"epochs": 3', '"epochs": "many"'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"ledger.json is not valid: epochs: 'many' is not a whole number"):
        Ledger.read(tmp_path)
