"""Stock text classifiers: their configurations, inputs and figures, for every type of encoder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from transformers import AutoTokenizer

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.evaluation.labelled_texts import LabelledTexts
from mlsm_plugin.evaluation.settings import FinetuneSettings
from mlsm_plugin.evaluation.text_classifier import TextClassifier, check_one_process, measured
from tests.tiny_hf_models import TOKENIZER_OF, make_model
from tests.tiny_models import TinyData

PAIRS = (("The name is bound.", "A value."), ("A list", "the value of the name is the name of a value"))


def labelled(labels: tuple[str, ...], texts: tuple[tuple[str, ...], ...]) -> LabelledTexts:
    return LabelledTexts(Path("none"), labels, texts, tuple(range(1, len(texts) + 1)))


def classifier_of(folder: Path, labels: tuple[str, ...] = ("a", "b"), **settings: Any) -> TextClassifier:
    return TextClassifier(folder, HuggingFaceTokenizer(folder), labels, FinetuneSettings(cpu=True, **settings))


@pytest.mark.parametrize("kind", TOKENIZER_OF)
def test_every_supported_encoder_gets_labels_and_dropout(kind: str, tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model(kind, tiny.text, tmp_path / "model")
    classifier = classifier_of(folder, dropout=0.25)
    model = classifier._model(seed=1)
    assert model.config.id2label == {0: "a", 1: "b"}
    assert model.config.label2id == {"a": 0, "b": 1}
    rates = {name: part.p for name, part in model.named_modules() if hasattr(part, "p")}
    assert rates
    assert {rate for name, rate in rates.items() if "mlp.drop" not in name and "activation" not in name} == {0.25}
    inputs, cut = classifier.tokenizer.inputs_of(PAIRS, classifier.positions)
    batch = AutoTokenizer.from_pretrained(folder).pad({"input_ids": [row["input_ids"] for row in inputs]},
                                                      return_tensors="pt")  # fmt: skip
    assert cut == 0
    assert model(**batch).logits.shape == (2, 2)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "modernbert"])
def test_inputs_are_those_of_the_stock_tokenizer(kind: str, tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model(kind, tiny.text, tmp_path / "model")
    tokenizer = HuggingFaceTokenizer(folder)
    stock = AutoTokenizer.from_pretrained(folder)
    for limit, cut in ((70, 0), (6, 2)):
        inputs, number = tokenizer.inputs_of(PAIRS, limit)
        assert number == cut
        for pair, own in zip(PAIRS, inputs, strict=True):
            assert own == dict(stock(*pair, truncation=True, max_length=limit))
    (single,), _ = tokenizer.inputs_of([("The name is bound.",)], 70)
    assert single == dict(stock("The name is bound."))


def test_special_tokens_in_a_text_are_text(tiny: TinyData, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(make_model("xlm-roberta", tiny.text, tmp_path / "model"))
    (inputs,), _ = tokenizer.inputs_of([("a <mask> </s> name",)], 70)
    assert inputs["input_ids"][-1] == tokenizer.end_id
    assert not {tokenizer.mask_id, tokenizer.end_id} & {*inputs["input_ids"][1:-1]}


def test_numbers_have_one_logit(tiny: TinyData, tmp_path: Path) -> None:
    classifier = classifier_of(make_model("bert", tiny.text, tmp_path / "model"), (), regression=True)
    config = classifier.config()
    assert (config.num_labels, config.problem_type) == (1, "regression")
    samples, _ = classifier.samples(labelled(("0.5", "-1"), (("The name",), ("A value",))))
    assert [sample["labels"] for sample in samples] == [0.5, -1.0]


def test_heads_depend_on_the_seed_only(tiny: TinyData, tmp_path: Path) -> None:
    classifier = classifier_of(make_model("roberta", tiny.text, tmp_path / "model"))
    heads = [classifier._model(seed).classifier.dense.weight for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_deberta_is_not_trained_in_half_precision(tiny: TinyData, tmp_path: Path) -> None:
    classifier = classifier_of(make_model("deberta", tiny.text, tmp_path / "model"), bf16="on")
    with pytest.raises(ValueError, match="a model of type deberta overflows in bfloat16; pass --bf16 off"):
        classifier.config()


def test_several_processes_and_gpus_are_refused() -> None:
    check_one_process(SimpleNamespace(world_size=1, n_gpu=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start it without torchrun"):
        check_one_process(SimpleNamespace(world_size=2, n_gpu=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"uses one GPU, and this process sees 4; .* CUDA_VISIBLE_DEVICES=0"):
        check_one_process(SimpleNamespace(world_size=1, n_gpu=4))  # type: ignore[arg-type]


def test_figures_are_those_of_other_libraries() -> None:
    labels, predicted = ("0", "1", "1", "0", "1"), ("1", "1", "0", "0", "1")
    predictions = [(label, 0.9) for label in predicted]
    assert measured(labels, predictions, FinetuneSettings()) == {"accuracy": 0.6}
    figures = measured(labels, predictions, FinetuneSettings(metric="f1"))
    assert figures["f1"] == pytest.approx(f1_score([*map(int, labels)], [*map(int, predicted)]))
    numbers = [("", number) for number in (1.0, 2.0, 4.0)]
    figures = measured(("1", "2", "3"), numbers, FinetuneSettings(regression=True))
    assert figures["spearman"] == pytest.approx(1)
    assert figures["pearson"] == pytest.approx(0.98198, abs=1e-4)
    constant = measured(("1", "1", "1"), numbers, FinetuneSettings(regression=True))
    assert constant == {"pearson": 0.0, "spearman": 0.0}


def test_an_encoder_of_other_shapes_than_its_configuration_is_refused(tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model("roberta", tiny.text, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ValueError, match=r"cannot be read: roberta.encoder.* has another shape in config.json"):
        classifier_of(folder)._model(seed=1)


def test_heads_of_narrow_encoders_begin_as_layers_of_their_width(tiny: TinyData, tmp_path: Path) -> None:
    model = classifier_of(make_model("roberta", tiny.text, tmp_path / "model"))._model(seed=1)
    assert float(model.classifier.dense.weight.std()) == pytest.approx((3 * 32) ** -0.5, rel=0.1)
    assert model.config.initializer_range == 0.02
