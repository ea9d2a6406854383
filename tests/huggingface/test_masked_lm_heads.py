"""The two halves of the heads of the library's masked LMs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM

from mlsm_plugin.core.hidden_states.hf_encoder import SUPPORTED, HuggingFaceEncoder, load_masked_lm
from mlsm_plugin.huggingface.pretraining_model import head_of
from tests.huggingface.tiny_corpus import tiny_bert
from tests.tiny_hf_models import make_model


@pytest.mark.parametrize("model_type", [*SUPPORTED, "deberta-v2 not legacy"])
def test_both_halves_together_are_the_head(tmp_path: Path, tiny: object, model_type: str) -> None:
    name, _, other = model_type.partition(" ")
    settings = {"legacy": False} if other else {}
    folder = make_model(name, tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM, **settings)  # type: ignore[attr-defined]
    model = load_masked_lm(folder).eval()
    torch.manual_seed(3)
    for values in model.parameters():
        torch.nn.init.normal_(values, std=0.1)
    ids = torch.randint(5, 100, (3, 9))
    head = head_of(model)
    transformed = head.transform(model.base_model(input_ids=ids)[0])
    assert transformed.size(-1) == head.width
    torch.testing.assert_close(head.project(transformed), model(input_ids=ids).logits)
    assert head.bias is not None
    assert any(head.bias is values for values in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_are_trained_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_bert().to(dtype).save_pretrained(tmp_path / "half")
    model = load_masked_lm(tmp_path / "half")
    assert {values.dtype for values in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_is_no_masked_lm_is_one_line(tmp_path: Path, tiny: object) -> None:
    text = tiny.text  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="saved without a masked-LM head"):
        load_masked_lm(make_model("bert", text, tmp_path / "headless", kind=AutoModel))
    with pytest.raises(ValueError, match="is not a folder of a Hugging Face model"):
        load_masked_lm(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the weights of .*empty cannot be read"):
        load_masked_lm(tmp_path / "empty")
    with pytest.raises(ValueError, match="an unknown form"):
        head_of(SimpleNamespace())
    broken = tmp_path / "broken"
    tiny_bert().save_pretrained(broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"the weights of .*broken cannot be read"):
        load_masked_lm(broken)


def test_a_deberta_of_its_authors_is_told_how_its_head_is_read(tmp_path: Path, tiny: object) -> None:
    text = tiny.text  # type: ignore[attr-defined]
    folder = make_model("deberta-v2", text, tmp_path / "model", kind=AutoModelForMaskedLM, legacy=False)
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    del settings["legacy"]
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match=r'head in lm_predictions.lm_head, .*; set "legacy": false in its config.json'):
        load_masked_lm(folder)


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "deberta", "deberta-v2"])
def test_a_bias_that_version_4_wrote_by_one_name_is_read(tmp_path: Path, tiny: object, kind: str) -> None:
    settings = {"tie_word_embeddings": False}
    folder = make_model(kind, tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM, **settings)  # type: ignore[attr-defined]
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith(".decoder.bias"))
    del weights[name]
    bias = torch.rand(len(weights[name.replace(".decoder.bias", ".bias")]))
    weights[name.replace(".decoder.bias", ".bias")] = bias
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(head_of(load_masked_lm(folder)).bias, bias)  # type: ignore[arg-type]


@pytest.mark.parametrize(("new_head", "lines"), [("which is said", 1), ("", 0)])
def test_a_new_head_is_made_where_there_is_none(
    tmp_path: Path, tiny: object, new_head: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model("roberta", tiny.text, tmp_path / "headless", kind=AutoModel)  # type: ignore[attr-defined]
    model = load_masked_lm(folder, new_head=new_head)
    assert float(head_of(model).transform(torch.ones(1, 32)).std()) > 0
    assert [record.message for record in caplog.records] == [
        f"{folder} has no masked-LM head; a new one is initialized at random, {new_head}"
    ] * lines


@pytest.mark.parametrize("kind", SUPPORTED)
def test_attention_dropout_is_of_the_training_and_not_of_the_saved_model(
    tmp_path: Path, tiny: object, kind: str
) -> None:
    name = "attention_dropout" if kind in ("distilbert", "modernbert") else "attention_probs_dropout_prob"
    settings = {"dropout" if kind == "distilbert" else "hidden_dropout_prob": 0.0, name: 0.5}
    folder = make_model(kind, tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM, **settings)  # type: ignore[attr-defined]
    ids = torch.randint(5, 100, (2, 9))

    def is_random(model: torch.nn.Module) -> bool:
        model.train()
        return not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)

    assert is_random(load_masked_lm(folder))
    model = load_masked_lm(folder, attention_dropout=0.0)
    assert not is_random(model)
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert saved[name] == 0.5


def test_half_precision_of_a_model_that_overflows_is_float32(
    tmp_path: Path, tiny: object, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model("deberta", tiny.text, tmp_path / "model", kind=AutoModel)  # type: ignore[attr-defined]
    ids = torch.randint(5, 100, (2, 9))
    found = [
        HuggingFaceEncoder(folder, layer=3, device="cpu", fp16=fp16).hidden_states(ids) for fp16 in (False, None, True)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    said = "a model of type deberta overflows in half precision; it is computed in float32"
    assert [record.message for record in caplog.records] == [said]  # nobody asked for half precision with None
