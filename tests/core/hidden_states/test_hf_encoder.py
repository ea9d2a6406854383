"""Hugging Face models as auxiliary models: their hidden states, and what is made of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from mlsm_plugin import hub
from mlsm_plugin.core.hidden_states.hf_encoder import SUPPORTED, HuggingFaceEncoder, HuggingFaceSource, load_masked_lm
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary, load_split
from mlsm_plugin.huggingface import MaskedLmModel
from tests.conftest import Pipeline, failing_mlsm, fairseq_train, logged, mlsm
from tests.huggingface.tiny_corpus import tiny_bert
from tests.tiny_hf_models import TOKENIZER_OF, library_ids, make_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def roberta(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("roberta", pipeline.train_text, tmp_path_factory.mktemp("hf") / "roberta")


@pytest.fixture(scope="module")
def data_bin(pipeline: Pipeline, roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("data") / "data-bin"
    texts = ("--train", pipeline.train_text, "--valid", pipeline.valid_text)
    mlsm("binarize", "--tokenizer", f"hf:{roberta}", *texts, "--output", output, "--workers", 2)
    return output


def test_binarized_text_holds_the_librarys_tokens(pipeline: Pipeline, roberta: Path, data_bin: Path) -> None:
    tokenizer = HuggingFaceTokenizer(roberta)
    dataset = load_split(str(data_bin / "valid"), load_dictionary(data_bin))
    found = [tokenizer.hf_ids[dataset[i].numpy()].tolist() for i in range(len(dataset)) if len(dataset[i]) > 1]
    lines = [line for line in pipeline.valid_text.read_text("utf-8").splitlines() if line]
    end = int(tokenizer.hf_ids[2])
    theirs = AutoTokenizer.from_pretrained(roberta)
    assert found == [[*library_ids(theirs, line), end] for line in lines]
    summary = json.loads((data_bin / "binarize.json").read_text())
    assert summary["dictionary_symbols"] == len(tokenizer.symbols) + 4
    assert summary["splits"]["train"]["unknown"] == 0


# models whose positions are relative: they run on longer samples than they are made for
RELATIVE = ("deberta", "deberta-v2", "modernbert")
# further settings that decide how a model is cut: the convolution of DeBERTa-v2-xlarge, embeddings of another width,
# positions in the embeddings and separate projections of positions; and ModernBERT's type of each layer
LONG_TO_TRAIN = ("camembert", "xlm-roberta")  # whose tokenizers take a second or two
OTHER_SETTINGS = (
    ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu", "embedding_size": 16}),
    ("deberta-v2", {"position_biased_input": True, "share_att_key": False, "type_vocab_size": 2}),
    ("deberta-v2", {"relative_attention": False, "position_biased_input": True, "pos_att_type": None}),
    ("modernbert", {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    ("modernbert", {"layer_types": ["full_attention"] * 3, "norm_bias": True, "attention_bias": True}),
)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        *(pytest.param(name, {}, marks=[pytest.mark.slow] * (name in LONG_TO_TRAIN)) for name in SUPPORTED),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_SETTINGS),
    ],
)
def test_hidden_states_are_the_librarys(
    model_type: str, settings: dict[str, Any], english_text: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = make_model(model_type, english_text[0], tmp_path / "model", **settings)
    mlsm(
        *("binarize", "--tokenizer", f"hf:{folder}", "--output", tmp_path / "data", "--workers", 1),
        *("--train", english_text[1], "--valid", english_text[1]),
    )
    texts = ["Short.", "The value of an expression is an object that has a name, and a much longer text it is."]
    theirs, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    batch = theirs(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True).hidden_states
    ours = HuggingFaceTokenizer(folder)
    to_fairseq = {number: index for index, number in enumerate(ours.hf_ids.tolist())}
    tokens = torch.tensor([[to_fairseq[number] for number in row] for row in batch["input_ids"].tolist()])
    assert len(expected) == 4
    for layer, states in enumerate(expected):
        encoder = HuggingFaceSource(f"hf:{folder}", tmp_path / "data", layer=layer, device="cpu")
        found = encoder.hidden_states(tokens)
        assert (encoder.num_layers, encoder.dim) == (3, 32)
        assert HuggingFaceSource.width_of(f"hf:{folder}") == encoder.dim
        attended = batch["attention_mask"].bool()
        assert states[attended].std() > 0.1
        torch.testing.assert_close(found[attended], states[attended], rtol=0, atol=1e-5)
    longest = torch.full((1, encoder.max_tokens), 5)
    assert torch.isfinite(encoder.hidden_states(longest)).all()
    if model_type in RELATIVE:
        assert encoder.max_tokens == model.config.max_position_embeddings
        return
    with pytest.raises((IndexError, RuntimeError)):
        encoder.hidden_states(torch.full((1, encoder.max_tokens + 1), 5))


@pytest.mark.slow
def test_from_text_to_a_model_that_is_used(roberta: Path, data_bin: Path, tmp_path: Path, capsys: Capture) -> None:
    data = tmp_path / "data-bin"
    shutil.copytree(data_bin, data)
    auxiliary, blocks = ("--auxiliary", f"hf:{roberta}"), ("--tokens-per-sample", 64)
    mlsm(
        *("dictionary", data, *auxiliary, "--layer", 2, "--output", tmp_path / "dictionary", "--atoms", 48),
        *("--tokens", 3000, "--iterations", 20, "--batch-size", 100, *blocks),
    )
    mlsm("encode", data, *auxiliary, "--dictionary", tmp_path / "dictionary", *blocks)
    short = (data, tmp_path / "model", "--max-update", 3, "--mlm-weight", 1, "--mask-whole-words")
    stored = fairseq_train(*short)
    online = fairseq_train(
        *(
            data,
            tmp_path / "online",
            *short[2:],
            "--no-save",
            "--latent-source",
            "online",
            "--auxiliary-checkpoint",
            f"hf:{roberta}",
        ),
        *("--latent-dictionary", tmp_path / "dictionary"),
    )
    assert logged(stored, "kl") == logged(online, "kl")
    assert logged(stored, "loss", where="valid") == logged(online, "loss", where="valid")

    model = hub.from_pretrained(tmp_path / "model")
    text = "The value of an expression is an object."
    assert model.decode(model.encode(text)) == text
    assert model.encode(text)[1:-1].tolist() == HuggingFaceTokenizer(roberta).fairseq_ids[
        library_ids(AutoTokenizer.from_pretrained(roberta), text)
    ].tolist()  # fmt: skip
    for filled, probability, token in model.fill_mask("The value of <mask> expression.", topk=4):
        assert 0 < probability < 1
        assert filled in (f"The value of {token} expression.", f"The value of{token} expression.")
    assert len(model.latent_properties(text, topk=2)) == len(model.encode(text)) - 2

    rows = "good\tA fine name.\nbad\tNo value at all.\n" * 8
    for split in ("train", "valid"):
        (tmp_path / f"{split}.tsv").write_text(rows, encoding="utf-8")
    mlsm(
        *("finetune", "--model", tmp_path / "model", "--output", tmp_path / "classifier", "--seeds", 1),
        *("--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv", "--max-epoch", 1, "--cpu"),
    )
    classify = transformers.pipeline("text-classification", str(tmp_path / "classifier" / "model"))
    assert classify("A fine name.")[0]["label"] in ("good", "bad")


def test_one_command_prepares_everything(pipeline: Pipeline, roberta: Path, tmp_path: Path, capsys: Capture) -> None:
    words = (
        *("preprocess", "--train", pipeline.valid_text, "--valid", pipeline.valid_text, "--output", tmp_path / "out"),
        *("--auxiliary", f"hf:{roberta}", "--atoms", 32, "--tokens", 2000, "--iterations", 10),
        *("--tokens-per-sample", 64),
    )
    mlsm(*words)
    assert AtomDictionary.load(tmp_path / "out" / "dictionary").meta["layer"] == 3
    assert (tmp_path / "out" / "data-bin" / "train.codes" / "meta.json").is_file()
    capsys.readouterr()
    mlsm(*words)
    table = capsys.readouterr().out
    assert [table.count(f"{step:<12}current") for step in ("binarize", "dictionary", "encode")] == [1, 1, 1]


def test_models_that_do_not_work_are_named(
    pipeline: Pipeline, roberta: Path, data_bin: Path, tmp_path: Path, capsys: Capture
) -> None:
    def refused(folder: object, *words: object, layer: int = 2) -> str:
        common = ("--layer", layer, "--output", tmp_path / "dictionary", "--tokens-per-sample", 64)
        line = failing_mlsm(capsys, "dictionary", data_bin, "--auxiliary", f"hf:{folder}", *common, *words)
        assert not (tmp_path / "dictionary").exists()
        return line

    def changed(name: str, file: str, **values: object) -> Path:
        folder = tmp_path / name
        shutil.copytree(roberta, folder)
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **values}))
        return folder

    assert "is not a folder of a Hugging Face model" in refused(tmp_path / "nowhere")
    assert "does not hold a Hugging Face model" in refused(tmp_path)
    gpt = refused(changed("gpt2", "config.json", model_type="gpt2"))
    assert f"of type gpt2; supported types: {', '.join(SUPPORTED)}" in gpt
    assert "--layer 4 is out of range" in refused(roberta, layer=4)
    assert "is more than the 68 positions" in refused(roberta, "--tokens-per-sample", 69)
    larger = changed("larger", "config.json", vocab_size=2000)
    assert "the tokenizer's ids need 600 embeddings, the model has 2000" in refused(larger)
    smaller = changed("smaller", "config.json", vocab_size=500)
    assert "the tokenizer's ids need 600 embeddings, the model has 500" in refused(smaller)
    wider = changed("wider", "config.json", intermediate_size=128)
    assert "cannot be read" in refused(wider)

    assert "is a decoder (is_decoder is true" in refused(changed("decoder", "config.json", is_decoder=True))

    partial = changed("partial", "config.json")
    weights = load_file(partial / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layer.1." not in name}
    save_file(kept, partial / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 16 weights of its model, such as encoder.layer.1." in refused(partial)
    (partial / "model.safetensors").unlink()
    assert "has no weights (model.safetensors or pytorch_model.bin)" in refused(partial)

    texts = ("--train", pipeline.valid_text, "--valid", pipeline.valid_text, "--output", tmp_path / "data")
    without = changed("without", "config.json")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (without / file).unlink()
    assert "has no readable tokenizer" in failing_mlsm(capsys, "binarize", "--tokenizer", f"hf:{without}", *texts)
    assert not (tmp_path / "data").exists()
    assert "is not a folder of a Hugging Face model" in failing_mlsm(capsys, "binarize", "--tokenizer", "hf:", *texts)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "deberta-v2"])
def test_layers_that_are_left_out_are_said(
    kind: str, english_text: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model(kind, english_text[0], tmp_path / "model", kind=AutoModelForMaskedLM)
    HuggingFaceEncoder(folder, layer=2)
    HuggingFaceEncoder(folder, layer=3)
    load_masked_lm(folder)
    assert "weights of layers" not in caplog.text
    content = json.loads((folder / "config.json").read_text())
    content["num_hidden_layers"] = 2
    if "layer_types" in content:
        content["layer_types"] = content["layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(content))
    load_masked_lm(folder)
    HuggingFaceEncoder(folder, layer=2)
    assert caplog.text.count("weights of layers that its config.json does not have, such as") == 2


def test_a_decoder_is_refused_by_models_too() -> None:
    model = tiny_bert(is_decoder=True)
    with pytest.raises(ValueError, match="this BertForMaskedLM is a decoder"):
        MaskedLmModel.of(model)


def test_every_supported_type_is_tested() -> None:
    assert set(TOKENIZER_OF) == set(SUPPORTED)
