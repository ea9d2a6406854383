"""What a loaded model offers: ids, features, tokens for a mask, and latent properties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fairseq import tasks

from mlsm_plugin.fairseq_plugin.text.symbol_files import special_symbols
from mlsm_plugin.hub import from_pretrained
from mlsm_plugin.hub.interface import MlsmHubInterface
from tests.tiny_models import TinyData, save_model, save_untrained, save_untrained_npm
from tests.tiny_run import seeded_model, training_config

TEXT = "The value of the expression is a list."


@pytest.fixture(scope="module")
def model(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> MlsmHubInterface:
    """With 48 atoms and 64 positions, not trained."""
    cfg = training_config(tiny.data_bin, "--mlm-weight", 1)
    cfg.model.num_atoms = 48
    made = seeded_model(cfg, tasks.setup_task(cfg.task))
    return from_pretrained(save_model(cfg, made, tmp_path_factory.mktemp("hub") / "model", tiny.data_bin))


def test_text_survives_encoding_and_decoding(model):
    tokens = model.encode(TEXT)
    dictionary = model.task.source_dictionary
    assert (tokens[0], tokens[-1]) == (dictionary.bos(), dictionary.eos())
    assert dictionary.unk() not in tokens
    assert model.decode(tokens) == TEXT


def test_loaded_model_is_in_eval_mode_and_deterministic(model):
    assert not model.training
    tokens = model.encode(TEXT)
    assert torch.equal(model.extract_features(tokens), model.extract_features(tokens))


def test_features_have_one_row_a_token(model):
    tokens = model.encode(TEXT)
    assert model.extract_features(tokens).shape == (1, len(tokens), 32)
    layers = model.extract_features(tokens, return_all_hiddens=True)
    assert [layer.shape for layer in layers] == [(1, len(tokens), 32)] * 3
    with pytest.raises(ValueError, match="tokens exceeds maximum length: 65 > 64"):
        model.extract_features(torch.full((65,), 5))


@pytest.mark.parametrize("text", [TEXT, "It\u2019s two  spaces", "\ufb01ne"])
def test_features_of_words_are_refused_in_one_line(model, text):
    with pytest.raises(
        ValueError, match=r"extract_features_aligned_to_words is not offered: .* a vector for each token"
    ):
        model.extract_features_aligned_to_words(text)


def test_a_head_that_was_not_trained_fills_no_mask(tiny: TinyData, tmp_path: Path) -> None:
    latent = save_untrained(tiny.data_bin, tmp_path / "latent", "--num-atoms", 8)
    for checkpoint, why in ((latent, "--mlm-weight was 0"), (save_untrained_npm(tiny, tmp_path / "npm"), "no loss on")):
        model = from_pretrained(checkpoint)
        assert len(model.encode(TEXT)) == model.extract_features(model.encode(TEXT)).size(1)
        with pytest.raises(ValueError, match=rf"was not trained \(.*{why}.*\): it cannot fill masks"):
            model.fill_mask("The <mask> is bound.")


def test_a_latent_head_that_was_not_trained_is_none(tiny: TinyData, tmp_path: Path) -> None:
    weights = ("--latent-weight", 0, "--mlm-weight", 1)
    model = from_pretrained(save_untrained(tiny.data_bin, tmp_path / "run", "--num-atoms", 8, *weights))
    assert model.num_atoms == 0
    with pytest.raises(ValueError, match="this model has no latent properties"):
        model.latent_properties(TEXT)
    assert len(model.fill_mask("The <mask> is bound.")) == 5


@pytest.mark.parametrize("topk", [1, 7])
def test_fill_mask_gives_the_likeliest_tokens(model, topk):
    found = model.fill_mask("The value of the <mask> is a list.", topk=topk)
    assert len(found) == topk
    scores = [score for _, score, _ in found]
    assert scores == sorted(scores, reverse=True)
    assert 0 < sum(scores) <= 1
    for text, _, token in found:
        assert "<mask>" not in text
        assert token in text


def test_fill_mask_leaves_special_symbols_out_with_their_probabilities(model):
    dictionary = model.task.source_dictionary
    head = model.model.encoder.lm_head
    before = head.bias.detach().clone()
    try:
        with torch.no_grad():
            head.bias[dictionary.eos()] += 10.0
        found = model.fill_mask("The value of the <mask> is a list.", topk=4)
        ids, (place,) = model._encode_with_masks("The value of the <mask> is a list.")
        with torch.no_grad():
            probabilities = model.model(torch.tensor([ids]))[0][0, place].softmax(dim=0)
    finally:
        head.bias.data.copy_(before)
    assert len(found) == 4
    for _, probability, token in found:
        symbol = token.replace(" ", "▁")
        assert probability == pytest.approx(float(probabilities[dictionary.index(symbol)]), rel=1e-5)
    assert sum(probability for _, probability, _ in found) < 0.1  # </s> has the rest


@pytest.mark.parametrize("text", ["<mask> is bound.", "A <mask>.", "(<mask>)", "A  <mask> b"])
def test_fill_mask_puts_tokens_where_fairseq_does(model, text):
    for filled, _, token in model.fill_mask(text, topk=20):
        before, after = text.split("<mask>")
        assert filled == (before.rstrip() if before.strip() else "") + token + after


def test_fill_mask_sees_the_part_of_a_long_text_that_is_around_the_mask(model):
    text = f"{TEXT} " * 20 + "The <mask> is a list. " + f"{TEXT} " * 20
    found = model.fill_mask(text, topk=3)
    ids, (place,) = model._encode_with_masks(text)
    seen = [ids[0], *ids[place - 30 : place + 32], ids[-1]]  # 64 positions, the mask in the middle
    with torch.no_grad():
        probabilities = model.model(torch.tensor([seen]))[0][0, 31].softmax(dim=0)
    assert seen[31] == model.task.mask_idx
    before, after = text.split("<mask>")
    for filled, probability, token in found:
        symbol = token.replace(" ", "▁")
        assert probability == pytest.approx(float(probabilities[model.task.source_dictionary.index(symbol)]), rel=1e-5)
        assert filled == before.rstrip() + token + after


def test_latent_distribution_is_one(model):
    tokens = model.encode(TEXT)
    assert model.num_atoms == 48
    for batch, size in [(tokens, 1), (torch.stack([tokens, tokens.flip(0)]), 2)]:
        distribution = model.latent_distribution(batch)
        assert distribution.shape == (size, len(tokens), 48)
        assert distribution.dtype == torch.float32
        assert not distribution.requires_grad
        torch.testing.assert_close(distribution.sum(dim=-1), torch.ones(size, len(tokens)))
    expected = model.latent_distribution(tokens)
    torch.testing.assert_close(model.latent_distribution(torch.stack([tokens, tokens]))[1:], expected)
    with pytest.raises(ValueError, match="the text has 65 tokens, the model takes at most 64"):
        model.latent_distribution(torch.full((65,), 5))


def test_latent_properties_name_the_strongest_atoms_of_each_piece(model):
    found = model.latent_properties(TEXT, topk=4)
    tokens = model.encode(TEXT)
    assert [entry.token for entry in found] == [model.task.source_dictionary[token] for token in tokens[1:-1]]
    distribution = model.latent_distribution(tokens)[0, 1:-1]
    for entry, row in zip(found, distribution, strict=True):
        probabilities = [probability for _, probability in entry.atoms]
        assert len(entry.atoms) == 4
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) <= 1
        assert all(row[atom].item() == pytest.approx(probability) for atom, probability in entry.atoms)
        assert probabilities[0] == pytest.approx(row.max().item())
    everything = model.latent_properties(TEXT, topk=1000)
    assert all(len(entry.atoms) == 48 for entry in everything)
    assert sum(probability for _, probability in everything[0].atoms) == pytest.approx(1, abs=1e-5)


def test_latent_properties_have_the_names_that_are_passed(model, tmp_path):
    (tmp_path / "names.json").write_text(json.dumps({str(atom): f"called {atom}" for atom in range(0, 48, 2)}))
    for entry in model.latent_properties(TEXT, topk=6, names=tmp_path / "names.json"):
        assert entry.names == ["" if atom % 2 else f"called {atom}" for atom, _ in entry.atoms]
    assert model.latent_properties(TEXT)[0].names == []
    (tmp_path / "names.json").write_text('{"48": "rain"}')
    with pytest.raises(ValueError, match="names atom 48, but there are only 48"):
        model.latent_properties(TEXT, names=tmp_path / "names.json")


def test_latent_properties_of_masks(model):
    pieces = [entry.token for entry in model.latent_properties("The <mask> of the<mask>")]
    assert pieces.count("<mask>") == 2
    assert pieces[-1] == "<mask>"
    without = [entry.token for entry in model.latent_properties("The")]
    assert pieces[: len(without) + 1] == [*without, "<mask>"]
    assert [entry.token for entry in model.latent_properties("<mask>")] == ["<mask>"]
    assert model.latent_properties("") == []


def test_what_a_model_lacks_is_said(tiny: TinyData) -> None:
    plain = from_pretrained(tiny.model)
    assert plain.num_atoms == 0
    for asked in (lambda: plain.latent_properties(TEXT), lambda: plain.latent_distribution(plain.encode(TEXT))):
        with pytest.raises(ValueError, match="no latent properties: it was not trained with masked_latent_semantic"):
            asked()
    with pytest.raises(ValueError, match="no classification head: fine-tune it with `mlsm finetune`"):
        plain.predict_label(TEXT)


@pytest.mark.parametrize("text", ["No mask.", "Two <mask> of <mask>."])
def test_a_text_without_one_mask_is_refused_in_one_line(model, text):
    with pytest.raises(ValueError, match=r"has [02] times <mask>, but needs it once"):
        model.fill_mask(text)


def test_topk_is_bounded(model):
    dictionary = model.task.source_dictionary
    most = len(dictionary) - len({*special_symbols(dictionary), model.task.mask_idx})
    filled = model.fill_mask("The <mask> is bound.", topk=most)
    assert (
        len({token for _, _, token in filled}) > 0.9 * most
    )  # pieces of words and words of the same letters are equal
    assert min(score for _, score, _ in filled) >= 0
    for topk in (0, -1, most + 1, 10**9):
        with pytest.raises(
            ValueError, match=rf"topk is {topk}; it must be at least 1, and at most {most:,}, the symbols"
        ):
            model.fill_mask("The <mask> is bound.", topk=topk)
    with pytest.raises(ValueError, match="topk is 0; it must be at least 1"):
        model.latent_properties(TEXT, topk=0)
