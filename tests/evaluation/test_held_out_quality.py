"""What is measured of two models on held-out text, and what is left out."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from mlsm_plugin.evaluation.held_out_quality import GOT_WORSE, HeldOutQuality
from mlsm_plugin.evaluation.quality_settings import QualitySettings
from tests.tiny_hf_models import make_model_with_own_tokens
from tests.tiny_models import TinyData

SETTINGS = QualitySettings(queries=40, passages=60)


@pytest.fixture
def models(tiny: TinyData, tmp_path: Path) -> dict[str, Path]:
    """A model, and one whose vectors are all the same."""
    good = make_model_with_own_tokens("bert", tiny.text, tmp_path / "good")
    bad = shutil.copytree(good, tmp_path / "bad")
    model = AutoModelForMaskedLM.from_pretrained(bad)
    torch.nn.init.zeros_(model.bert.embeddings.word_embeddings.weight)
    model.save_pretrained(bad)
    return {"before": good, "after": bad}


@pytest.fixture
def text(tiny: TinyData, tmp_path: Path) -> Path:
    rng = random.Random(1)
    words = tiny.text.read_text().split()
    topics = [rng.sample(words, 12) for _ in range(60)]  # passages differ by their words
    lines = [" ".join(rng.choices(topic, k=8)) for topic in topics for _ in range(5)]
    path = tmp_path / "held_out.txt"
    path.write_text("\n".join(lines))
    return path


def test_a_model_that_finds_less_is_told_if_its_loss_fell(models: dict[str, Path], text: Path) -> None:
    quality = HeldOutQuality(settings=SETTINGS)
    figures = quality.measure(models, text, loss_fell=True)
    assert (figures["sentences"], figures["passages"], figures["lines"]) == (40, 60, 80)
    low, high = figures["models"]["after"]["measures"]["nDCG@10"]["difference_from_first"]
    assert low < high < 0
    assert set(figures["models"]["before"]["measures"]) == {"nDCG@10", "bits/token", "bits/word"}
    assert figures["notes"] == [GOT_WORSE]
    assert quality.measure(models, text, loss_fell=False)["notes"] == []
    backwards = {"before": models["after"], "after": models["before"]}
    assert quality.measure(backwards, text, loss_fell=True)["notes"] == []


def test_each_measure_stands_alone(models: dict[str, Path], tmp_path: Path) -> None:
    """A short text has too few passages, but words to mask; an empty one has neither, and probes need none."""
    short = tmp_path / "short.txt"
    short.write_text("one line of a name\nanother line of a value\n")
    labelled = tmp_path / "train.tsv"
    labelled.write_text("".join(f"{label}\tthe name of {label}\n" for label in "ab" * 3))
    figures = HeldOutQuality([(labelled, labelled)], SETTINGS).measure(models, short, loss_fell=True)
    (note,) = figures["notes"]
    assert note.startswith("retrieval is left out: the text has 1 passages")
    probe = labelled.resolve().parent.name
    assert set(figures["models"]["after"]["measures"]) == {"bits/token", "bits/word", probe}
    assert (figures["sentences"], figures["passages"], figures["lines"]) == (0, 0, 2)
    short.write_text("\n")
    figures = HeldOutQuality([(labelled, labelled)], SETTINGS).measure(models, short, loss_fell=True)
    assert figures["notes"] == ["retrieval and masked words are left out: the held-out text has no whole line"]
    assert set(figures["models"]["after"]["measures"]) == {probe}
    figures = HeldOutQuality(settings=SETTINGS).measure(models, short, loss_fell=True)
    assert figures["models"] == {}


def test_a_model_that_cannot_be_measured_is_a_note(models: dict[str, Path], text: Path) -> None:
    (models["after"] / "modules.json").write_text('[{"type": "a.Pooling", "path": "nowhere"}]')
    figures = HeldOutQuality(settings=SETTINGS).measure(models, text, loss_fell=True)
    assert figures["models"] == {}
    assert "the models are not compared: " in figures["notes"][0]


def test_labelled_files_are_checked_first(tmp_path: Path) -> None:
    wrong = tmp_path / "train.tsv"
    wrong.write_text("a text without a label\n")
    with pytest.raises(ValueError, match=r"train\.tsv"):
        HeldOutQuality([(wrong, wrong)]).check()
    HeldOutQuality().check()
