"""What the page shows, as data: against the library's model, the coder and the index themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from mlsm_plugin.explore import explorer as explorer_module
from mlsm_plugin.explore.explorer import Explorer, open_explorer
from mlsm_plugin.search.text_codes import open_text_coder
from tests.adapted_student import ATOMS, adapted_student
from tests.explore.explored import Folders, opened
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

TEXT = "the name of a value is returned"


def test_the_properties_of_tokens_are_those_of_the_coder(explorer: Explorer) -> None:
    coded = explorer.coder.coded([TEXT])[0]
    tokens = explorer.read(TEXT, properties=3)
    assert [token.text for token in tokens] == [TEXT[start:stop] for start, stop in coded.offsets]
    for token, code in zip(tokens, coded.codes.toarray(), strict=True):
        assert not token.is_mask
        shares = [item.share for item in token.properties]
        assert shares == sorted(shares, reverse=True)
        for item in token.properties:
            assert item.share == pytest.approx(code[item.atom] / code.sum(), rel=1e-4)
        assert shares[0] == pytest.approx(code.max() / code.sum(), rel=1e-4)


def test_the_tokens_of_a_mask_are_those_of_the_library(explorer: Explorer, folders: Folders) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    model = AutoModelForMaskedLM.from_pretrained(folders[0]).eval()
    inputs = tokenizer("the [MASK] of a [MASK] is returned", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id]
    for text in ("the [MASK] of a [MASK] is returned", "the <mask> of a <mask> is returned"):
        masks = [token for token in explorer.read(text, predictions=3) if token.is_mask]
        assert len(masks) == 2
        for mask, row in zip(masks, logits.softmax(dim=1), strict=True):
            assert mask.properties
            for word, probability in mask.predicted:
                number = tokenizer.convert_tokens_to_ids(word)
                assert probability == pytest.approx(float(row[number]), rel=1e-3)
                assert number not in tokenizer.all_special_ids
            row[tokenizer.all_special_ids] = 0
            assert mask.predicted[0][1] == pytest.approx(float(row.max()), rel=1e-3)


@pytest.mark.parametrize("strength", [0.7, -1.5])
def test_steering_is_the_librarys_model_with_a_changed_layer(
    explorer: Explorer, folders: Folders, strength: float
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    model = AutoModelForMaskedLM.from_pretrained(folders[0]).eval()
    inputs = tokenizer("the [MASK] of a [MASK] is returned", return_tensors="pt")
    direction = torch.from_numpy(np.load(folders[1] / "dictionary.npy")[7])

    def hook(_module: object, arguments: tuple[torch.Tensor, ...]) -> None:
        for place in range(1, inputs["input_ids"].shape[1] - 1):  # without [CLS] and [SEP]
            hidden = arguments[0][0, place]
            hidden += strength * hidden.norm() * direction

    model.bert.encoder.layer[1].register_forward_pre_hook(hook)
    with torch.no_grad():
        logits = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id]
    steered = explorer.steered("the <mask> of a <mask> is returned", "7", strength, predictions=3)
    assert (steered.atom, steered.name, len(steered.of_masks)) == (7, explorer.name_of(7), 2)
    for tokens, row in zip(steered.of_masks, logits.softmax(dim=1), strict=True):
        assert len(tokens) == 3
        for word, probability in tokens:
            assert probability == pytest.approx(float(row[tokenizer.convert_tokens_to_ids(word)]), rel=1e-4)


def test_a_strength_of_0_changes_nothing(explorer: Explorer) -> None:
    masks = [token.predicted for token in explorer.read("the <mask> of a [MASK]") if token.is_mask]
    assert list(explorer.steered("the <mask> of a [MASK]", "7", 0).of_masks) == masks
    assert list(explorer.steered("the <mask> of a [MASK]", "7", 1).of_masks) != masks
    assert [token.predicted for token in explorer.read("the <mask> of a [MASK]") if token.is_mask] == masks
    assert explorer.steered("the name", "7", 1).of_masks == ()


def test_a_property_is_found_by_its_number_or_a_part_of_its_name(folders: Folders, tmp_path: Path) -> None:
    names = ["rain, snow", "Snow", "3", "sun", "RAIN", "train", "rail", "rail", "a <b>"]
    (tmp_path / "names.json").write_text(json.dumps(dict(enumerate(names))))
    model, dictionary, _ = folders
    explorer = open_explorer(model, dictionary=dictionary, names=tmp_path / "names.json")
    for query, atom in (
        ("3", 3),
        ("property 2", 2),
        (" snow ", 1),
        ("rain", 4),
        ("N, s", 0),
        ("B>", 8),
        ("property 20", 20),
    ):
        assert explorer.atom_of(query) == atom
    for query, message in (
        ("rai", r'5 properties have "rai" in their names; write a number: 0 \(rain, snow\); 4 \(RAIN\); .*rail\)$'),
        ("rail", r'2 properties have "rail" in their names; write a number: 6 \(rail\); 7 \(rail\)$'),
        ("property", r"31 properties .*; 13 \(property 13\), \.\.\.$"),
        ("40", 'no property has "40" in its name; the numbers are 0 to 39$'),
        (" ", "no property was named"),
        ("\ud800", "the property is not Unicode text"),
    ):
        with pytest.raises(ValueError, match=message):
            explorer.atom_of(query)


def test_what_cannot_be_steered_is_one_line(explorer: Explorer, folders: Folders) -> None:
    assert explorer.can_steer
    for strength in (float("nan"), float("inf"), 2.1, -1e30):
        with pytest.raises(ValueError, match=r"the strength must be from -2 to 2, got "):
            explorer.steered("<mask>", "7", strength)
    with pytest.raises(ValueError, match="the text has 301 tokens, and the model reads at most 68 at once"):
        explorer.steered("name " * 300 + "<mask>", "7", 1)
    without_head = Explorer(open_text_coder(folders[0], folders[1]))
    assert not without_head.can_steer
    with pytest.raises(ValueError, match="steering needs a dictionary"):
        without_head.steered("<mask>", "7", 1)


def test_results_are_those_of_the_index_with_the_names_of_the_page(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps({str(atom): f"called {atom}" for atom in range(0, 40, 2)}))
    explorer = opened(folders, names=tmp_path / "names.json")
    assert explorer.index is not None
    text = explorer.index.documents[5].text
    hits = explorer.search(f"{text} <mask>", mode="words", count=3)
    assert hits[0].document.text == text
    reasons = [reason for hit in hits for reason in hit.reasons]
    assert {reason.atom % 2 for reason in reasons} == {0, 1}
    for reason in reasons:
        expected = f"called {reason.atom}" if reason.atom % 2 == 0 else explorer.index.labels[reason.atom]
        assert reason.label == expected
    named = [item for token in explorer.read(text) for item in token.properties if item.atom % 2 == 0]
    assert {item.name for item in named} == {f"called {item.atom}" for item in named}


@pytest.mark.parametrize("flags", [(), ("--vocab-size", 300)], ids=["one vocabulary", "two"])
def test_the_output_of_an_adaptation(
    flags: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]
) -> None:
    output = adapted_student(tmp_path_factory, english_text[0], *flags)
    explorer = open_explorer(output)
    assert explorer.coder.num_atoms == ATOMS
    assert explorer.predicts_tokens
    assert not explorer.can_steer  # its latent head predicts the properties: they are no directions
    tokens = explorer.read("The <mask> of a function.")
    (mask,) = [token for token in tokens if token.is_mask]
    assert len(mask.predicted) == 8
    assert sum(item.share for item in explorer.read("The <mask>", properties=ATOMS)[1].properties) == pytest.approx(1)
    assert any(not item.name.startswith("property ") for token in tokens for item in token.properties)
    same = open_explorer(output / "model")  # without the text, properties have numbers
    assert same.read("name")[0].properties[0].name.startswith("property ")
    (output / "model").rename(output / "moved")
    try:
        with pytest.raises(ValueError, match="is not finished; run the same `mlsm adapt` again"):
            open_explorer(output)
    finally:
        (output / "moved").rename(output / "model")


def test_an_encoder_without_a_head_reads_no_masks(tiny: TinyData, folders: Folders, tmp_path: Path) -> None:
    coder = open_text_coder(folders[0], folders[1])
    explorer = Explorer(coder)
    assert not explorer.has_mask
    assert not any(token.is_mask for token in explorer.read("the [MASK]"))
    bare = make_model("bert", tiny.text, tmp_path / "bare")
    assert explorer_module._masked_tokens(bare, open_text_coder(folders[0], folders[1])) is None
    with pytest.raises(ValueError, match="has no latent head, which would predict codes; pass --dictionary"):
        open_explorer(bare)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" \n", "the text is empty"),
        ("a" * 5001, "the text has 5,001 characters; 5,000 can be shown"),
        ("name " * 300, "the text has 300 tokens, and the model reads at most 68 at once"),
        ("a\ud800", "is not Unicode text"),
        ("a\0", "has a NUL character"),
        ("\u200b", "the tokenizer of the model finds no token in the text"),
    ],
)
def test_what_cannot_be_shown_is_one_line(explorer: Explorer, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explorer.read(text)


def test_a_search_without_words_is_one_line(explorer: Explorer) -> None:
    with pytest.raises(ValueError, match="the text has only masks; add words to search for"):
        explorer.search("<mask> [MASK]")


def test_a_page_that_reads_no_masks_searches_for_their_words(explorer: Explorer) -> None:
    without_masks = Explorer(explorer.coder, index=explorer.index)
    tokens = without_masks.read("<mask>")
    hits = without_masks.search("<mask>", mode="codes")
    assert tokens
    assert hits
    shared = {reason.atom for hit in hits for reason in hit.reasons}
    assert shared <= set(explorer.coder.coded(["<mask>"])[0].codes.indices.tolist())


def test_what_is_not_there_is_one_line(folders: Folders) -> None:
    explorer = Explorer(open_text_coder(folders[0], folders[1]))
    with pytest.raises(ValueError, match="no index"):
        explorer.search("name")
    with pytest.raises(ValueError, match="no datastore"):
        explorer.phrases_of("<mask>")
    for option in ({"datastore": "store"}, {"npm_checkpoint": "model.pt"}):
        with pytest.raises(ValueError, match="need both --datastore and --npm-checkpoint"):
            open_explorer(folders[0], dictionary=folders[1], **option)


def test_names_of_other_atoms_and_the_index_of_another_model_are_refused(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('{"40": "rain"}')
    with pytest.raises(ValueError, match="names atom 40, but there are only 40"):
        opened(folders, names=tmp_path / "names.json")
    atoms = np.load(folders[1] / "dictionary.npy")
    other = tmp_path / "dictionary"
    other.mkdir()
    np.save(other / "dictionary.npy", atoms[::-1].copy())
    (other / "meta.json").write_bytes((folders[1] / "meta.json").read_bytes())
    with pytest.raises(ValueError, match="was built with another model or dictionary"):
        open_explorer(folders[0], dictionary=other, index=folders[2])
