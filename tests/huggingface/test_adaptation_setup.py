"""What is filled in where the settings of an adaptation leave a choice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.files.atomic_files import read_json, write_json
from mlsm_plugin.core.files.sentence_modules import write_modules
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.core.text.hf_tokenizer import load_fast_tokenizer
from mlsm_plugin.huggingface import Masking, TrainingSettings
from mlsm_plugin.huggingface.adaptation_settings import LEARNING_RATE_OF_KEPT
from mlsm_plugin.huggingface.kept_states_model import KEEP_WEIGHT
from mlsm_plugin.huggingface.student_model import new_model
from mlsm_plugin.huggingface.training import LEARNING_RATE
from tests.huggingface.tiny_adaptation import setup_of

LAYERS = 3


@pytest.mark.parametrize(
    ("settings", "length"), [({}, 200), ({"student": "1x64"}, 128), ({"student": "1x64", "max_length": 150}, 150)]
)
def test_a_new_model_reads_shorter_sequences(
    start: Path, tmp_path: Path, settings: dict[str, Any], length: int
) -> None:
    assert setup_of(start, tmp_path, **{"max_length": None, **settings}).length == length


def test_the_auxiliary_model_is_read_at_its_last_layer(start: Path, tmp_path: Path) -> None:
    assert setup_of(start, tmp_path, objective="regression+mlm").layer == LAYERS
    assert setup_of(start, tmp_path, objective="regression+mlm", regressed_layer=1).layer == 1
    coded = setup_of(start, tmp_path, objective="mlsm")
    assert coded.learning is not None
    assert (coded.learning.layer, coded.layer) == (LAYERS, LAYERS)
    assert setup_of(start, tmp_path, objective="mlsm", learning=LearningSettings(layer=2)).layer == 2
    assert setup_of(start, tmp_path).learning is None


def test_a_model_learns_the_vectors_of_a_teacher_that_is_at_least_as_wide(start: Path, tmp_path: Path) -> None:
    assert not setup_of(start, tmp_path).narrows_vectors
    assert not setup_of(start, tmp_path, objective="distill-vectors", student="1x32").narrows_vectors
    assert setup_of(start, tmp_path, objective="distill-vectors", student="1x16").narrows_vectors
    with pytest.raises(ValueError, match=r"the model is 64 wide, and the vectors of the teacher .* are only 32 wide"):
        setup_of(start, tmp_path, objective="distill-vectors", student="1x64")


def test_a_configuration_of_a_new_model_is_recorded_as_it_is_written(start: Path, tmp_path: Path) -> None:
    content = read_json(start / "model" / "config.json") | {"num_hidden_layers": 1, "transformers_version": "1"}
    write_json(tmp_path / "config.json", content)
    before = setup_of(start, tmp_path, student=str(tmp_path)).training_identity()["student"]
    setup = setup_of(start, tmp_path, student=str(tmp_path))
    new_model(setup.config, load_fast_tokenizer(start / "model"))  # which completes the configuration
    assert setup.training_identity()["student"] == before
    write_json(tmp_path / "config.json", content | {"transformers_version": "2"})
    assert setup_of(start, tmp_path, student=str(tmp_path / "config.json")).training_identity()["student"] == before
    whole = setup.config.to_dict()  # as earlier versions recorded it
    write_json(tmp_path / "steps.json", {"training": {"signature": {"settings": {"student": whole}}}})
    assert (
        setup_of(start, tmp_path, student=str(tmp_path)).training_identity()["student"]
        == read_json(tmp_path / "steps.json")["training"]["signature"]["settings"]["student"]
    )
    by_version_4 = content | {"torch_dtype": "float32", "_name_or_path": "bert"}
    write_json(tmp_path / "config.json", by_version_4)
    whole = setup_of(start, tmp_path, student=str(tmp_path)).config.to_dict()
    write_json(tmp_path / "steps.json", {"training": {"signature": {"settings": {"student": whole}}}})
    recorded = read_json(tmp_path / "steps.json")["training"]["signature"]["settings"]["student"]
    assert setup_of(start, tmp_path, student=str(tmp_path)).training_identity()["student"] == recorded
    write_json(tmp_path / "config.json", content | {"num_hidden_layers": 2})
    assert setup_of(start, tmp_path, student=str(tmp_path)).training_identity()["student"] != before


def test_a_size_is_no_folder(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1x64").mkdir()
    assert setup_of(start, tmp_path / "1x64", student="1x64").training_identity()["student"] == "1x64"


def test_a_batch_size_that_follows_from_accumulation_goes_on(start: Path, tmp_path: Path) -> None:
    recipe = {"batch_size": 32, "accumulate": 2, "attention_dropout": 0.0}  # of an earlier version
    write_json(tmp_path / "steps.json", {"training": {"signature": {"settings": {"training": recipe}}}})
    training = TrainingSettings(cpu=True, bf16="off", accumulate=2)
    assert setup_of(start, tmp_path, objective="npm", training=training).training.batch_size == 32


def test_recorded_processes_and_batches_go_on(start: Path, tmp_path: Path) -> None:
    recipe = {"batch_size": 3, "accumulate": 5, "attention_dropout": 0.0}
    record = {"training": {"signature": {"settings": {"training": recipe, "processes": 2}}}}
    (tmp_path / "steps.json").write_text(json.dumps(record), encoding="utf-8")
    setup = setup_of(start, tmp_path, training=TrainingSettings(cpu=True, bf16="off"))
    assert (setup.processes, setup.training.batch_size, setup.training.accumulate) == (2, 3, 5)
    setup = setup_of(start, tmp_path, training=TrainingSettings(cpu=True, bf16="off", batch_size=4))
    assert setup.training.batch_size == 4


def vectors_of(start: Path, root: Path) -> Path:
    """A copy of ``start`` whose model is a sentence-transformers folder."""
    folder = root / "vectors"
    shutil.copytree(start, folder)
    write_modules(folder / "model", width=64, max_length=100)
    return folder


def test_vectors_that_are_used_are_kept(start: Path, tmp_path: Path) -> None:
    assert setup_of(start, tmp_path).keep_weight is None
    assert setup_of(start, tmp_path, keep_vectors=0.0).keep_weight is None
    assert setup_of(start, tmp_path, keep_vectors=2.0).keep_weight == 2
    vectors = vectors_of(start, tmp_path)
    assert setup_of(vectors, tmp_path).keep_weight == KEEP_WEIGHT
    assert setup_of(vectors, tmp_path).settings_of_card(8)["weight of kept hidden states"] == KEEP_WEIGHT
    assert setup_of(vectors, tmp_path, keep_vectors=0.0).keep_weight == 0
    assert setup_of(vectors, tmp_path, objective="taco").keep_weight is None
    assert setup_of(vectors, tmp_path, student="1x64").keep_weight is None


def test_a_larger_rate_suits_kept_vectors(start: Path, tmp_path: Path) -> None:
    assert setup_of(start, tmp_path).training.learning_rate == LEARNING_RATE
    assert setup_of(start, tmp_path, keep_vectors=1.0).training.learning_rate == LEARNING_RATE_OF_KEPT
    chosen = TrainingSettings(cpu=True, learning_rate=3e-5)
    assert setup_of(start, tmp_path, keep_vectors=1.0, training=chosen).training.learning_rate == 3e-5


@pytest.mark.parametrize(("same_model", "weight"), [(True, None), (False, KEEP_WEIGHT)])
def test_a_training_that_was_begun_before_there_was_a_weight_goes_on_without(
    start: Path, tmp_path: Path, same_model: bool, weight: float | None
) -> None:
    vectors = vectors_of(start, tmp_path)
    model = HuggingFaceSource.fingerprint_of(vectors / "model") if same_model else "another"
    settings = {"training": {"batch_size": 3, "accumulate": 5}, "objective": "mlm", "model": model}
    for recorded, expected in ((settings, weight), ({**settings, "keep_weight": 0.0}, KEEP_WEIGHT)):
        record = {"training": {"signature": {"settings": recorded}}}
        (tmp_path / "steps.json").write_text(json.dumps(record), encoding="utf-8")
        setup = setup_of(vectors, tmp_path)
        assert setup.keep_weight == expected
        assert setup.training_identity().get("keep_weight") == expected
        assert setup_of(vectors, tmp_path, keep_vectors=2.0).keep_weight == 2


def test_epochs_count_in_place_of_updates(start: Path, tmp_path: Path) -> None:
    training = TrainingSettings(cpu=True, bf16="off", batch_size=4, accumulate=2, updates=7)
    assert setup_of(start, tmp_path, training=training).updates(80) == 7
    assert setup_of(start, tmp_path, training=training, epochs=1.5).updates(80) == 15


def test_a_card_shows_what_the_objective_has(start: Path, tmp_path: Path) -> None:
    masking = Masking(mask_prob=0.3, mask_prob_end=0.2)
    coded = setup_of(start, tmp_path, objective="mlsm", masking=masking).settings_of_card(8)
    assert (coded["masked"], coded["masked at the end"], coded["sequences of an update"]) == (0.3, 0.2, 8)
    assert str(coded["dictionary"]).endswith("layer 3")
    assert not {"masked", "dictionary"} & set(setup_of(start, tmp_path, objective="npm").settings_of_card(8))
