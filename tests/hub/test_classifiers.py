"""Classifiers that fairseq's ``sentence_prediction`` trained, as ``mlsm finetune`` once did, open from the hub."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mlsm_plugin import hub
from tests.classification_data import save_classifier
from tests.conftest import mlsm
from tests.tiny_models import TinyData

TEXTS = ("The name is bound.", "A value.", "The value of the name is a list of names", "An object is a value.")


def test_labels_have_their_names_also_those_of_special_symbols(tiny: TinyData, tmp_path: Path) -> None:
    model = hub.from_pretrained(save_classifier(tiny, tmp_path, ["<pad>", "</s>", "long"]))
    labels = [label for label, _ in model.predict_labels([(text,) for text in TEXTS])]
    assert {*labels} <= {"<pad>", "</s>", "long"}
    assert {model.label(number) for number in range(3)} == {"<pad>", "</s>", "long"}
    assert model.predict_label("The name is bound.", "A name.") in ("<pad>", "</s>", "long")


def test_numbers_are_predicted(tiny: TinyData, tmp_path: Path) -> None:
    folder = save_classifier(tiny, tmp_path, ["a"], "--regression-target")
    number = hub.from_pretrained(folder).predict_label("A short one.")
    assert isinstance(number, float)
    assert math.isfinite(number)


def test_batches_do_not_change_predictions(tiny: TinyData, tmp_path: Path) -> None:
    model = hub.from_pretrained(save_classifier(tiny, tmp_path, ["a", "b"]))
    alone = [model.predict_labels([(text,)])[0] for text in TEXTS]
    together = model.predict_labels([(text,) for text in TEXTS], batch_size=3)
    assert [label for label, _ in together] == [label for label, _ in alone]
    scores = [torch.tensor([score for _, score in predictions]) for predictions in (alone, together)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-5)


def test_long_texts_are_cut_with_a_warning(tiny: TinyData, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = hub.from_pretrained(save_classifier(tiny, tmp_path, ["a", "b"]))
    assert model.predict_label("the value of the name " * 40) in ("a", "b")
    assert "1 of 1 texts are longer than the model's positions and are cut" in caplog.text


def test_the_mean_of_two_classifiers_is_one(tiny: TinyData, tmp_path: Path) -> None:
    folders = [save_classifier(tiny, tmp_path / str(number), ["a", "b"]) for number in range(2)]
    (tmp_path / "mean").mkdir()
    checkpoints = [folder / "checkpoint_last.pt" for folder in folders]
    mlsm("convert", *checkpoints, tmp_path / "mean" / "model.pt")
    assert hub.from_pretrained(tmp_path / "mean").predict_label(TEXTS[0]) in ("a", "b")
