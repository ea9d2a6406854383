"""The folder of a trained model is opened again and compared."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from mlsm_plugin.cli.convert import _kind_of
from mlsm_plugin.core.hidden_states.hf_encoder import load_masked_lm
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.evaluation.pair_models import LibraryModel, open_pair_model
from mlsm_plugin.hub.hf_import import import_model
from mlsm_plugin.huggingface import MaskedLmModel, SpanContrastiveModel, save_pretrained
from mlsm_plugin.huggingface.saved_folder import check_saved
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

LINES = ["The name is bound.", "A value, and another one."]


def saved(kind: type, tiny: TinyData, root: Path, model_type: str = "xlm-roberta") -> tuple[Path, object]:
    """A folder, and the model that was saved there; the tokenizer that it was trained with lies in ``model``."""
    start = make_model(model_type, tiny.text, root / "model", kind=AutoModelForMaskedLM)
    model = kind.from_pretrained(start)  # type: ignore[attr-defined]
    save_pretrained(root / "out", model, AutoTokenizer.from_pretrained(start))
    return root / "out", model


@pytest.mark.parametrize("kind", [MaskedLmModel, SpanContrastiveModel])
@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "deberta-v2"])
def test_what_was_saved_is_what_was_trained(
    kind: type, model_type: str, tiny: TinyData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = saved(kind, tiny, tmp_path, model_type)
    check_saved(folder, model, HuggingFaceTokenizer(tmp_path / "model"), LINES)
    assert not caplog.records
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    assert architecture.endswith("ForMaskedLM") == (kind is MaskedLmModel)


@pytest.mark.parametrize("kind", [MaskedLmModel, SpanContrastiveModel])
def test_other_weights_are_named(kind: type, tiny: TinyData, tmp_path: Path) -> None:
    folder, model = saved(kind, tiny, tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("layer.1.output.dense.bias"))
    weights[name] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"holds another {name} than the trained model"):
        check_saved(folder, model, HuggingFaceTokenizer(tmp_path / "model"), LINES)


def test_other_ids_are_named(tiny: TinyData, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, model = saved(MaskedLmModel, tiny, tmp_path)
    own = HuggingFaceTokenizer(tmp_path / "model")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(folder)  # marks what stands after a mask
    check_saved(folder, model, own, LINES)
    assert "reads 'The name <mask> bound.' with other ids beside the mask than it was trained on" in caplog.text
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ValueError, match=r"gives other ids for 'The name is bound\.' than the one used in training"):
        check_saved(folder, model, own, LINES)


def test_a_trainers_checkpoint_keeps_the_head(tiny: TinyData, tmp_path: Path) -> None:
    _, model = saved(SpanContrastiveModel, tiny, tmp_path)
    model.save_pretrained(tmp_path / "checkpoint-3")  # type: ignore[attr-defined]
    whole, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint-3", "out"))
    assert any(name.startswith("lm_head.") for name in whole)
    assert not any(name.startswith("lm_head.") for name in alone)
    assert torch.equal(whole["roberta.embeddings.word_embeddings.weight"], alone["embeddings.word_embeddings.weight"])


def test_a_checkpoint_with_an_untrained_head_predicts_nothing(tiny: TinyData, tmp_path: Path) -> None:
    _, model = saved(SpanContrastiveModel, tiny, tmp_path)
    trained = MaskedLmModel.from_pretrained(tmp_path / "model")
    for name, trainers_model in (("checkpoint-3", model), ("checkpoint-4", trained)):
        trainers_model.save_pretrained(tmp_path / name)  # type: ignore[attr-defined]
        (tmp_path / name / "trainer_state.json").write_text("{}", encoding="utf-8")
        (tmp_path / name / "optimizer.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="is a Trainer's checkpoint without a tokenizer; copy the tokenizer's files"):
        open_pair_model(tmp_path / "checkpoint-4")
    for name in ("checkpoint-3", "checkpoint-4"):
        AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / name)
    assert isinstance(open_pair_model(tmp_path / "checkpoint-4"), LibraryModel)
    for opened in (open_pair_model, load_masked_lm, lambda name: import_model(name, tmp_path / "imported", LINES)):
        with pytest.raises(ValueError, match="does not train the masked-LM head; use a model whose head is trained"):
            opened(tmp_path / "checkpoint-3")
    assert SpanContrastiveModel.from_pretrained(tmp_path / "checkpoint-3")
    assert _kind_of(Namespace(sources=[str(tmp_path / "checkpoint-3")], last=None)) == "a model of Hugging Face"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_weights_of_low_precision_are_said(
    kind: torch.dtype, tiny: TinyData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = make_model("bert", tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM)
    stock = AutoModelForMaskedLM.from_pretrained(start).to(kind)
    MaskedLmModel.of(stock)
    said = "the weights of this BertForMaskedLM are in bfloat16: it computes in this precision"
    assert (said in caplog.text) == (kind is torch.bfloat16)
