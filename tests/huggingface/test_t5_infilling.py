"""A stock T5 fills the gaps of a text, as the library itself generates."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from mlsm_plugin.cli.infill import needs_fairseq
from mlsm_plugin.huggingface.t5_infilling import T5Infiller
from tests import tiny_hf_models
from tests.conftest import failing_mlsm, mlsm

Capture = pytest.CaptureFixture[str]
SOURCE = "The <extra_id_0> is bound to the <extra_id_1> of it."
SHAPES: dict[str, dict[str, Any]] = {
    "1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
PAD, EOS = 1, 2


def make_t5(text: Path, folder: Path, *, extra: int = 100, **shape: Any) -> T5ForConditionalGeneration:
    """Write a T5 with random weights: its sentinels end the vocabulary, counted down, and rows of no token follow."""
    plain = tiny_hf_models.make_tokenizer("unigram", text, folder)
    backend = plain.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    symbols = [f"<extra_id_{number}>" for number in reversed(range(extra))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        extra_special_tokens=symbols,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    torch.manual_seed(1)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer) + 12, **sizes, **special, **shape)).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: Any, english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("t5")
    make_t5(english_text[0], root, **SHAPES[request.param])
    return root


def test_one_hypothesis_is_what_a_loop_finds(folder: Path) -> None:
    model, tokenizer = T5ForConditionalGeneration.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    sentinels = tokenizer.convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(100)])
    assert sentinels == list(range(len(tokenizer) - 1, len(tokenizer) - 101, -1))
    source = torch.tensor([tokenizer(SOURCE)["input_ids"]])
    target, scores = [PAD], []
    for _ in range(12):
        with torch.no_grad():
            logits = model(input_ids=source, decoder_input_ids=torch.tensor([target])).logits[0, -1]
        target.append(int(logits.argmax()))
        scores.append(float(logits.log_softmax(0).max()))
        if target[-1] in (EOS, sentinels[2]):
            break
    found = T5Infiller(folder).infill(SOURCE, beam=1, max_length=12)
    assert [filler.sentinel for filler in found.fillers] == ["<extra_id_0>", "<extra_id_1>"]
    for filler, sentinel in zip(found.fillers, sentinels[:2], strict=True):
        assert filler.is_missing is (sentinel not in target)
    expected = tokenizer.decode([token for token in target[1:] if token not in (PAD, EOS)]).strip()
    assert found.target == expected


def learned(folder: Path, target: str) -> T5ForConditionalGeneration:
    """The model after it has learned one target by heart."""
    model, tokenizer = T5ForConditionalGeneration.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    source, labels = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (SOURCE, target))
    for _ in range(120):
        optimizer.zero_grad()
        model(input_ids=source, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("token", ["</s>", "<pad>"])
@pytest.mark.parametrize("text", ["The <extra_id_0> is {} bound.", "{} The <extra_id_0> is", "The <extra_id_0>{}"])
def test_a_text_that_ends_itself_is_refused(folder: Path, text: str, token: str, capsys: Capture) -> None:
    line = failing_mlsm(capsys, "infill", text.format(token), "--checkpoint", f"hf:{folder}")
    assert f"the text contains {token}, which the tokenizer reads as a special token that ends or pads a text" in line


@pytest.mark.slow
def test_words_that_were_learned_fill_the_gaps(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    text, target = "The name is bound to the value of it.", "<extra_id_0> name <extra_id_1> value <extra_id_2>"
    learned(folder, target).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "model")
    filled = T5Infiller(f"hf:{tmp_path}/model").infill(SOURCE)
    assert filled.text == text
    assert filled.target.split() == target.replace(" <", "<").split()
    assert [filler.text for filler in filled.fillers] == ["name", "value"]
    assert all(-0.5 < filler.score <= 0 for filler in filled.fillers)
    capsys.readouterr()
    mlsm("infill", "--checkpoint", f"hf:{tmp_path}/model", SOURCE, "--beam", 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == text
    assert re.fullmatch(r"  <extra_id_0> +-\d\.\d\d\d  name", lines[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Nothing is missing.", "the text has no gap: write <extra_id_0> where words are missing"),
        ("A <extra_id_0> and a <extra_id_0>.", "<extra_id_0> occurs twice; give each gap its own sentinel"),
        ("A <extra_id_100>.", "<extra_id_100> is not one of the 100 sentinels"),
        ("\u96ea\u96ea <extra_id_0> \u96ea", "of the tokens of the text are unknown"),
    ],
)
def test_texts_that_cannot_be_infilled_are_refused(folder: Path, capsys: Capture, text: str, message: str) -> None:
    assert message in failing_mlsm(capsys, "infill", "--checkpoint", f"hf:{folder}", text)


def test_other_models_are_refused(english_text: tuple[Path, Path], tmp_path: Path, capsys: Capture) -> None:
    bert = tiny_hf_models.make_model("bert", english_text[0], tmp_path / "bert")
    line = failing_mlsm(capsys, "infill", "--checkpoint", f"hf:{bert}", SOURCE)
    assert "is a model of type bert; supported types: t5" in line
    make_t5(english_text[0], tmp_path / "plain", extra=0, **SHAPES["1.0"])
    line = failing_mlsm(capsys, "infill", "--checkpoint", f"hf:{tmp_path}/plain", SOURCE)
    assert "has no <extra_id_0>; use the tokenizer of a T5" in line


def test_a_t5_needs_no_fairseq() -> None:
    from argparse import Namespace

    assert not needs_fairseq(Namespace(checkpoint="hf:t5"))
    assert needs_fairseq(Namespace(checkpoint="model"))


def test_no_text_vanishes_from_a_filled_text(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(folder, tmp_path / "t5")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["[E1]"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "t5")
    text = "[E1] If the name is bound to the value of it, then the \u96ea <extra_id_0> is bound to the value of it."
    filled = T5Infiller(tmp_path / "t5").infill(text, beam=1, max_length=2)
    assert filled.text.startswith("[E1] If the name")
    assert "then the <unk> " in filled.text
    assert "most frequent unknown characters: '\u96ea' U+96EA (1 times)" in caplog.text


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "t5")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"new{number}" for number in range(20)])
    tokenizer.save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match=r"the tokenizer's ids need \d+ embeddings, the model has \d+"):
        T5Infiller(tmp_path / "t5")


def test_the_search_is_that_of_the_arguments(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "t5")
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    generation |= {"return_dict_in_generate": True, "output_scores": True}
    (tmp_path / "t5" / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    infiller = T5Infiller(tmp_path / "t5")
    assert infiller.infill(SOURCE, max_length=4) == T5Infiller(folder).infill(SOURCE, max_length=4)
    for wrong, message in (({"beam": 0}, "beam is 0"), ({"max_length": 0}, "max_length is 0")):
        with pytest.raises(ValueError, match=f"{message}; it must be at least 1"):
            infiller.infill(SOURCE, **wrong)
