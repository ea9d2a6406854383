"""The models that fine-tuning starts from, as stock folders of Hugging Face."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from mlsm_plugin.evaluation.starting_models import CheckpointStart, LibraryStart, open_starting_model
from tests.classification_data import save_classifier
from tests.tiny_hf_models import make_model
from tests.tiny_models import POSITIONS, TinyData, save_untrained_npm

TEXTS = ("The name is bound.", "A value.")


@pytest.mark.parametrize("kind", ["masked LM", "npm"])
def test_a_checkpoint_is_exported_once(tiny: TinyData, tmp_path: Path, kind: str) -> None:
    """A checkpoint without a trained masked-LM head, too."""
    checkpoint = tiny.model if kind == "masked LM" else save_untrained_npm(tiny, tmp_path / "npm")
    start = open_starting_model(checkpoint.parent)
    assert isinstance(start, CheckpointStart)
    folder = start.stock_folder(tmp_path / "out", TEXTS)
    assert folder == tmp_path / "out" / "exported"
    config = AutoModelForSequenceClassification.from_pretrained(folder).config
    assert config.max_position_embeddings == (POSITIONS if kind == "masked LM" else 40) + 2
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert start.stock_folder(tmp_path / "out", TEXTS) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert LibraryStart(folder).tokenizer.ids_of(TEXTS[0]) == start.tokenizer.ids_of(TEXTS[0])


def test_a_folder_of_the_library_is_taken_as_it_is(tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model("bert", tiny.text, tmp_path / "bert")
    start = open_starting_model(folder)
    assert isinstance(start, LibraryStart)
    assert start.stock_folder(tmp_path / "out", TEXTS) == folder
    assert not (tmp_path / "out").exists()


def test_the_fingerprint_is_of_contents(tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model("bert", tiny.text, tmp_path / "bert")
    moved = shutil.copytree(folder, tmp_path / "moved")
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    assert open_starting_model(moved).fingerprint() == open_starting_model(folder).fingerprint()
    fingerprints = [open_starting_model(path).fingerprint() for path in (folder, other)]
    assert fingerprints[0]["model"] != fingerprints[1]["model"]
    assert fingerprints[0]["tokenizer"] == fingerprints[1]["tokenizer"]
    (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + " ")
    assert open_starting_model(folder).fingerprint()["tokenizer"] != fingerprints[0]["tokenizer"]


def test_what_cannot_be_fine_tuned_is_refused(tiny: TinyData, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent does not exist; a model on the hub is hf:"):
        open_starting_model(tmp_path / "absent")
    with pytest.raises(ValueError, match="this is a fine-tuned classifier; export the pre-trained checkpoint"):
        open_starting_model(save_classifier(tiny, tmp_path, ["a", "b"]))
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "gpt" / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a model of type gpt2; supported types: "):
        open_starting_model(tmp_path / "gpt")
