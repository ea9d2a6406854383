"""New models from a size or a configuration, and tokenizers learned from a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from mlsm_plugin.core.text.hf_tokenizer import load_fast_tokenizer
from mlsm_plugin.huggingface.student_model import geglu_dim, learn_tokenizer, new_model, student_config
from tests.tiny_hf_models import TOKENIZERS, make_model, make_tokenizer


def test_a_size_is_a_model_that_the_library_opens(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    make_tokenizer("word_piece", english_text[1], tmp_path / "tokenizer")
    tokenizer = load_fast_tokenizer(tmp_path / "tokenizer")
    model = new_model(student_config("2x128"), tokenizer)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 128, 2)
    assert config.intermediate_size == geglu_dim(128)
    assert config.vocab_size == len(tokenizer)
    assert (config.pad_token_id, config.cls_token_id) == (tokenizer.pad_token_id, tokenizer.cls_token_id)
    model.save_pretrained(tmp_path / "model")
    batch = tokenizer(["the name", "a value is bound to a name"], padding=True, return_tensors="pt")
    opened = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(opened(**batch).logits, model.eval()(**batch).logits)


def test_every_layer_sees_the_whole_sequence(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    make_tokenizer("word_piece", english_text[1], tmp_path / "tokenizer")
    model = new_model(student_config("1x64"), load_fast_tokenizer(tmp_path / "tokenizer")).eval()
    ids = torch.randint(5, 100, (1, 300))
    changed = ids.clone()
    changed[0, 0] = 4
    assert not torch.equal(model(ids).logits[0, -1], model(changed).logits[0, -1])


def test_a_configuration_gives_a_model_of_its_kind(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    make_model("deberta-v2", english_text[1], tmp_path / "other", kind=AutoModelForMaskedLM)
    make_tokenizer("unigram", english_text[1], tmp_path / "tokenizer")
    tokenizer = load_fast_tokenizer(tmp_path / "tokenizer")
    for name in (tmp_path / "other", tmp_path / "other" / "config.json"):
        model = new_model(student_config(str(name)), tokenizer)
        assert model.config.model_type == "deberta-v2"
        assert model.get_input_embeddings().num_embeddings == len(tokenizer)


@pytest.mark.parametrize("student", ["0x64", "2x100", "4x", "x256", "nowhere", "2x0", "4x256x2"])
def test_what_is_no_size_is_refused(student: str) -> None:
    with pytest.raises(ValueError, match="--student"):
        student_config(student)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_learned_tokenizer_is_of_the_same_kind(kind: str, english_text: tuple[Path, Path], tmp_path: Path) -> None:
    make_tokenizer(kind, english_text[1], tmp_path / "pattern")
    learn_tokenizer([english_text[0]], tmp_path / "pattern", tmp_path / "learned", vocab_size=400)
    pattern = AutoTokenizer.from_pretrained(tmp_path / "pattern")
    learned = AutoTokenizer.from_pretrained(tmp_path / "learned")
    assert 300 < len(learned) <= 400
    for role in ("mask_token", "pad_token", "unk_token", "cls_token", "sep_token", "bos_token"):
        assert getattr(learned, role) == getattr(pattern, role)
    states = [json.loads(one.backend_tokenizer.to_str()) for one in (pattern, learned)]
    assert states[0]["pre_tokenizer"] == states[1]["pre_tokenizer"]
    ids = learned("the name of a value")["input_ids"]
    assert (ids[0], ids[-1]) == tuple(learned("")["input_ids"])
    assert learned.unk_token_id not in ids


def test_a_size_that_the_text_cannot_fill_is_said(
    english_text: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a name\n", encoding="utf-8")
    make_tokenizer("word_piece", english_text[1], tmp_path / "pattern")
    learn_tokenizer([text], tmp_path / "pattern", tmp_path / "learned", vocab_size=400)
    assert "different pieces; --vocab-size 400 is more" in caplog.text
    with pytest.raises(ValueError, match="--vocab-size 6 is too small for the characters of the text"):
        learn_tokenizer([english_text[0]], tmp_path / "pattern", tmp_path / "small", vocab_size=6)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("kind", ["word_piece", "unigram"])
def test_more_characters_than_pieces_are_one_line(kind: str, english_text: tuple[Path, Path], tmp_path: Path) -> None:
    make_tokenizer(kind, english_text[1], tmp_path / kind)
    lines = ["".join(map(chr, range(first, first + 20))) for first in range(0x4E00, 0x4F00, 20)]
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match=r"--vocab-size 100 is too small|no tokenizer of 100 pieces can be learned"):
        learn_tokenizer([tmp_path / "text.txt"], tmp_path / kind, tmp_path / "learned", vocab_size=100)
    assert not (tmp_path / "learned").exists()
