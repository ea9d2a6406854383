"""Vectors and masked words: against the library's own models, one text at a time, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from mlsm_plugin.evaluation.sentence_encoders import (
    NO_WORD,
    HuggingFaceSentences,
    check_encoder_names,
    open_sentence_encoder,
    words_of_offsets,
    words_of_pieces,
)
from mlsm_plugin.huggingface import save_pretrained
from tests.conftest import mlsm
from tests.tiny_hf_models import make_model_with_own_tokens
from tests.tiny_models import TinyData

TEXTS = ["the name of a value", "a", "return the value of the name, if there is one"]


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_vectors_are_the_means_of_the_librarys_hidden_states(tiny: TinyData, tmp_path: Path, kind: str) -> None:
    folder = make_model_with_own_tokens(kind, tiny.text, tmp_path / kind)
    vectors = open_sentence_encoder(folder).vectors(TEXTS, batch_tokens=20)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).double().eval()
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(vector, hidden.mean(dim=0), atol=1e-5)


def test_the_loss_of_masked_words_is_that_of_the_librarys_model(tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model_with_own_tokens("bert", tiny.text, tmp_path / "bert")
    words = [[1, 4], [0], [2]]
    losses = open_sentence_encoder(folder).masked_word_losses(TEXTS, words, batch_tokens=20)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).double().eval()
    for text, chosen, (loss, num_words, num_tokens) in zip(TEXTS, words, losses, strict=True):
        encoding = tokenizer(text.split(), is_split_into_words=True, return_tensors="pt")
        masked = torch.tensor([word in chosen for word in encoding.word_ids()])
        ids = encoding["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=ids.masked_fill(masked, tokenizer.mask_token_id)).logits[0, masked]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, masked], reduction="sum")
        assert loss == pytest.approx(float(expected), abs=1e-4)
        assert (num_words, num_tokens) == (len(chosen), int(masked.sum()))


def test_a_fairseq_checkpoint_and_its_export_give_the_same(tiny: TinyData, tmp_path: Path) -> None:
    mlsm("convert", tiny.model, tmp_path / "export", "--text", tiny.text, "--lines", 5)
    checkpoint, export = open_sentence_encoder(tiny.model), open_sentence_encoder(tmp_path / "export")
    np.testing.assert_allclose(checkpoint.vectors(TEXTS), export.vectors(TEXTS), atol=1e-5)
    words = [[1, 4], [0], [2, 9]]
    losses = [model.masked_word_losses(TEXTS, words) for model in (checkpoint, export)]
    np.testing.assert_allclose(*losses, atol=1e-4)
    assert checkpoint.parameters > 0


def test_a_model_without_a_head_gives_vectors_only(tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model_with_own_tokens("bert", tiny.text, tmp_path / "bert")
    save_pretrained(tmp_path / "encoder", AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    encoder = open_sentence_encoder(tmp_path / "encoder")
    assert encoder.mask is None
    assert "without a masked-LM head" in encoder.why_no_head
    np.testing.assert_allclose(encoder.vectors(TEXTS), open_sentence_encoder(folder).vectors(TEXTS), atol=1e-6)


def test_long_texts_are_cut_and_their_words_not_counted(
    tiny: TinyData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = open_sentence_encoder(tiny.model)
    long = " ".join(["name"] * 200)
    assert np.isfinite(encoder.vectors([long])).all()
    assert "1 of 1 texts are longer" in caplog.text
    assert encoder.masked_word_losses([long], [[199]]) == [(0.0, 0, 0)]


def test_a_cut_text_keeps_its_end_and_a_cut_word_does_not_count(tiny: TinyData, tmp_path: Path) -> None:
    folder = make_model_with_own_tokens("bert", tiny.text, tmp_path / "bert")
    encoder = open_sentence_encoder(folder)
    text = "the name of a valuename"
    ids, words = encoder.encoded(text)
    last_word = max(words)
    assert words.count(last_word) > 1, "the last word must have several tokens"
    encoder.positions = len(ids) - 1
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([[*ids[:-2], ids[-1]]])).last_hidden_state[0]
    np.testing.assert_allclose(encoder.vectors([text])[0], hidden.mean(dim=0).numpy(), atol=1e-5)
    ((loss, number, tokens),) = encoder.masked_word_losses([text], [[0, last_word]])
    assert (number, tokens) == (1, words.count(0))
    assert loss > 0


@given(st.text(max_size=30))
def test_characters_are_in_the_words_of_split(text: str) -> None:
    words = text.split()
    of_characters = words_of_offsets(text, [(place, place + 1) for place in range(len(text))])
    rebuilt = ["" for _ in words]
    for place, (character, word) in enumerate(zip(text, of_characters, strict=True)):
        if not character.isspace():
            rebuilt[word] += character
        else:
            rest = words[word:] if word != NO_WORD else []
            assert text[place:].split() == rest
    assert rebuilt == words
    assert words_of_offsets(text, [(0, 0)]) == [NO_WORD]


def test_pieces_that_do_not_match_the_words_are_no_words() -> None:
    assert words_of_pieces("ab c", ["▁a", "b", "▁c"]) == [0, 0, 1]
    assert words_of_pieces("ab c", ["▁a", "▁b", "▁c"]) == [NO_WORD] * 3


def test_no_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="a model on the hub is hf:"):
        open_sentence_encoder(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        check_encoder_names(["hf:any", tmp_path, tmp_path / "none"])


def test_values_that_are_not_finite_are_no_figures(tiny: TinyData, tmp_path: Path) -> None:
    encoder = open_sentence_encoder(make_model_with_own_tokens("bert", tiny.text, tmp_path / "bert"))
    assert isinstance(encoder, HuggingFaceSentences)
    with torch.no_grad():
        next(iter(encoder._encoder.parameters())).fill_(3e38)  # finite, but sums of it are not
    with pytest.raises(ValueError, match="bert is damaged, or its training has diverged; not finite are its vectors"):
        encoder.vectors(TEXTS)
    with pytest.raises(ValueError, match="not finite are its losses"):
        encoder.masked_word_losses(TEXTS, [[0], [0], [0]])
