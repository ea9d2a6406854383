"""A stock RoBERTa, XLM-R, CamemBERT or BERT becomes a checkpoint of ``mlsm_roberta`` that computes the same."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from mlsm_plugin import hub
from mlsm_plugin.core.text.masked_reading import masked_lines
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import read_state, weights_in
from mlsm_plugin.fairseq_plugin.compat.model_parts import EMBEDDINGS, OUTPUT
from mlsm_plugin.hub import hf_import, roberta_import
from mlsm_plugin.hub.hf_import import import_model
from mlsm_plugin.hub.stock_models import POSITIONS as POSITION_WEIGHTS
from mlsm_plugin.hub.stock_models import TOKEN_TYPES, bert_name
from tests.conftest import mlsm
from tests.hub.modern_models import POSITIONS
from tests.hub.test_modernbert_import import LINES, changed, padded, refused
from tests.published_models import as_published, make_roberta
from tests.tiny_hf_models import OWN_TOKENS, make_model_with_own_tokens
from tests.tiny_models import TinyData

KINDS = ("roberta", "xlm-roberta", "camembert", "bert")


@pytest.fixture(scope="module")
def roberta(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library") / "roberta"
    make_roberta("roberta", tiny.text, folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in KINDS),
        ("roberta", {"layer_norm_eps": 1e-2, "vocab_size": 608}),
        ("bert", {"layer_norm_eps": 1e-3, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.0}),
        ("bert", {"tie_word_embeddings": False}),
    ],
)
def test_logits_are_those_of_the_library(kind: str, settings: dict[str, Any], tiny: TinyData, tmp_path: Path) -> None:
    theirs = make_roberta(kind, tiny.text, tmp_path / "library", **settings)
    proof = import_model(f"hf:{tmp_path}/library", tmp_path / "model", LINES)
    assert (proof.lines, proof.reordered) == (3, 0)
    assert 0 < proof.largest_difference <= 1e-4
    ours = hub.from_pretrained(tmp_path / "model")
    ids = torch.from_numpy(ours.bpe.tokenizer.hf_ids)
    assert not torch.equal(ids, torch.arange(len(ids)))
    batch, seen = padded(ours)
    with torch.no_grad():
        expected = theirs(input_ids=ids[batch], attention_mask=seen.long()).logits[seen][:, ids]
        found = ours.model(batch)[0][seen]
    assert found.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert ours.model.max_positions() == POSITIONS
    options = ours.model.args
    assert (options.dropout, options.attention_dropout) == (
        theirs.config.hidden_dropout_prob, theirs.config.attention_probs_dropout_prob,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["roberta", "bert", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("xlm-roberta", "camembert"))]
)
def test_export_of_the_import_has_the_original_weights_and_ids(kind: str, tiny: TinyData, tmp_path: Path) -> None:
    first = make_roberta(kind, tiny.text, tmp_path / "library").state_dict()
    import_model(tmp_path / "library", tmp_path / "model", LINES)
    mlsm("convert", tmp_path / "model", tmp_path / "out", "--text", tiny.text, "--lines", 20)
    written = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    second, named = written.state_dict(), bert_name if kind == "bert" else str
    folded = first[named(POSITION_WEIGHTS)][-POSITIONS:] + first[named(TOKEN_TYPES)][0]
    torch.testing.assert_close(second[POSITION_WEIGHTS][-POSITIONS:], folded, rtol=0, atol=0)
    assert second[TOKEN_TYPES].eq(0).all()
    others = second.keys() - {POSITION_WEIGHTS, TOKEN_TYPES, "roberta.embeddings.position_ids"}
    assert len(others) > 50
    for name in others:
        torch.testing.assert_close(second[name], first[named(name)], rtol=0, atol=0)
    assert written.config.layer_norm_eps == AutoConfig.from_pretrained(tmp_path / "library").layer_norm_eps
    library, exported = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("library", "out"))
    ids = library("The name is bound, as above: the.")["input_ids"]
    place = len(ids) - 3  # of "the", before the full stop and the end
    assert library.decode(ids[place]).strip() == "the"
    masked = exported(f"The name is bound, as above: {exported.mask_token}.")["input_ids"]
    assert masked == [*ids[:place], library.mask_token_id, *ids[place + 1 :]]


@pytest.mark.parametrize("kind", ["sentencepiece", "roberta", "xlm-roberta"])
def test_masks_are_read_alike_after_exports_and_imports(kind: str, tiny: TinyData, tmp_path: Path) -> None:
    if kind == "sentencepiece":
        first = tiny.model
    else:
        make_roberta(kind, tiny.text, tmp_path / "library")
        first = tmp_path / "first"
        import_model(tmp_path / "library", first, LINES)
    lines = tiny.text.read_text(encoding="utf-8").splitlines()[:30]
    compared = ("--text", tiny.text, "--lines", 30)
    mlsm("convert", first, tmp_path / "exported", *compared)
    assert import_model(tmp_path / "exported", tmp_path / "second", lines).masked > 50
    mlsm("convert", tmp_path / "second", tmp_path / "again", *compared)
    models = [hub.from_pretrained(folder) for folder in (first, tmp_path / "second")]
    variants = [variant for line in lines for variant in masked_lines(line, "<mask>")]
    for text in ["the name <mask>.", *variants]:
        pieces = [[model.task.source_dictionary[i] for i in model._encode_with_masks(text)[0]] for model in models]
        assert pieces[1] == pieces[0], text


def test_special_tokens_of_the_own_list_are_compared_as_tokens(tiny: TinyData, tmp_path: Path) -> None:
    library = make_model_with_own_tokens("bert", tiny.text, tmp_path / "library")
    lines = ["the [E1] name [/E1] of x[E1]y", "a [E1] [MASK] <ctrl> [SEP] b", "the name is bound"]
    proof = import_model(f"hf:{library}", tmp_path / "model", lines)
    assert (proof.lines, proof.with_symbols) == (3, 1)
    mlsm("convert", tmp_path / "model", tmp_path / "again", "--text", tiny.text, "--lines", 2)
    ours = hub.from_pretrained(tmp_path / "model")
    dictionary = ours.task.source_dictionary
    assert ours.encode(lines[0]).tolist().count(dictionary.index("[E1]")) == 2
    filled = [token for _, _, token in ours.fill_mask("the <mask> of", topk=len(dictionary) - 10)]
    assert len(filled) > 500
    assert not {*OWN_TOKENS, "[E1]", "[/E1]"} & {*filled}


def test_files_as_they_are_published(roberta: Path, tmp_path: Path) -> None:
    published = as_published(roberta, tmp_path / "published")
    assert {path.name for path in published.iterdir()} == {
        "config.json", "merges.txt", "pytorch_model.bin", "vocab.json",
    }  # fmt: skip
    proof = import_model(published, tmp_path / "model", LINES)
    assert (proof.lines, proof.reordered) == (3, 0)
    import_model(roberta, tmp_path / "other", LINES)
    first, second = (weights_in(read_state(tmp_path / name / "model.pt")) for name in ("model", "other"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "model/dict.txt").read_bytes() == (tmp_path / "other/dict.txt").read_bytes()


def test_flags_are_those_of_the_configuration(roberta: Path) -> None:
    config = AutoConfig.from_pretrained(roberta)
    expected = (
        "--encoder-layers 3 --encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --encoder-attention-heads 2 "
        "--dropout 0.1 --attention-dropout 0.1 --max-positions 48 --layer-norm-eps 1e-05 --tokens-per-sample 48"
    )
    assert " ".join(roberta_import.architecture_flags(config)) == expected
    config.tie_word_embeddings, config.layer_norm_eps, config.max_position_embeddings = False, 1e-12, 2050
    found = " ".join(roberta_import.architecture_flags(config))
    assert "--max-positions 2048 --untie-weights-roberta --layer-norm-eps 1e-12 --tokens-per-sample 1024" in found


@pytest.mark.slow
def test_tied_weights_stay_tied(roberta: Path, tiny: TinyData, tmp_path: Path) -> None:
    import_model(roberta, tmp_path / "tied", LINES)
    make_roberta("bert", tiny.text, tmp_path / "bert", tie_word_embeddings=False)
    import_model(tmp_path / "bert", tmp_path / "untied", LINES)
    for name in ("tied", "untied"):
        weights = weights_in(read_state(tmp_path / name / "model.pt"))
        assert torch.equal(weights[EMBEDDINGS], weights[OUTPUT]) is (name == "tied")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "relu"}, "has hidden_act relu; only gelu can be imported"),
        ({"position_embedding_type": "relative_key"}, "has position_embedding_type relative_key; only absolute"),
        ({"is_decoder": True}, "is a decoder (is_decoder is true"),
        ({"vocab_size": 2000}, "the tokenizer's ids need 600 embeddings, the model has 2000"),
        ({"layer_norm_eps": 0.0}, "--layer-norm-eps must be positive, got 0.0"),
    ],
)
def test_models_that_ours_cannot_be_are_refused(
    values: dict[str, object], message: str, roberta: Path, tmp_path: Path
) -> None:
    assert message in refused(changed(roberta, tmp_path / "changed", **values), tmp_path)


def without_head(source: Path, folder: Path) -> Path:
    """A copy that was saved without its masked-LM head."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: values for name, values in weights.items() if not name.startswith("lm_head")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_head_may_be_missing_only_where_it_is_not_needed(
    roberta: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = without_head(roberta, tmp_path / "headless")
    assert "was saved without a masked-LM head" in refused(folder, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert import_model(folder, tmp_path / "npm", LINES, npm="phrase").largest_difference <= 1e-4
    assert "has no masked-LM head; a new one is initialized at random, and not trained" in caplog.text
    (folder / "model.safetensors").unlink()
    save_file({"lm_head.bias": torch.zeros(600)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 5\d weights of its model"):
        import_model(folder, tmp_path / "empty", LINES, npm="phrase")


def lightning(source: Path, folder: Path, **more: Any) -> Path:
    """A folder with a checkpoint as Lightning writes it, of a module with the model two attributes down."""
    as_published(source, folder)
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    named = {f"model.encoder.{name}": values for name, values in state.items()} | {"temperature": torch.ones(1)}
    torch.save({"state_dict": named, "epoch": 3, "hyper_parameters": {"lr": 1e-4}, **more}, folder / "last.ckpt")
    return folder


@pytest.mark.slow
def test_checkpoints_of_lightning(roberta: Path, tmp_path: Path) -> None:
    proof = import_model(lightning(roberta, tmp_path / "lightning"), tmp_path / "model", LINES, npm="single")
    assert proof.largest_difference <= 1e-4
    import_model(roberta, tmp_path / "other", LINES)
    first, second = (weights_in(read_state(tmp_path / name / "model.pt")) for name in ("model", "other"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class Runs:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_code_runs_from_weights(roberta: Path, tmp_path: Path) -> None:
    hostile = lightning(roberta, tmp_path / "hostile", callbacks=Runs(tmp_path / "ran"))
    assert "holds Python objects, which are not loaded" in refused(hostile, tmp_path)
    (hostile / "last.ckpt").unlink()
    (hostile / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.bias": Runs(tmp_path / "ran")}))
    assert "cannot be read" in refused(hostile, tmp_path)
    (hostile / "pytorch_model.bin").unlink()
    (hostile / "last.ckpt").write_bytes(b"nothing")
    assert "last.ckpt is not a readable checkpoint of Lightning" in refused(hostile, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_flags_of_npm_say_how_to_query(roberta: Path, tmp_path: Path) -> None:
    proof = import_model(roberta, tmp_path / "model", LINES, npm="single")
    flags = " ".join(proof.flags)
    assert flags.startswith(" ".join(hf_import.NPM))
    assert "--closed-set-temperature 5.0 --span-mode single --arch mlsm_roberta" in flags
    task = hub.from_pretrained(tmp_path / "model").task
    mask = task.source_dictionary.index("<mask>")
    assert task.span_masks == [mask, mask]
    assert json.loads((tmp_path / "model/hf_tokenizer/tokenizer.json").read_text())["model"]["type"] == "BPE"
