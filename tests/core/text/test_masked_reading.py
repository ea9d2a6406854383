"""What a tokenizer of Hugging Face reads beside masks, against the tokens of the same text in training."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.masked_reading import masked_lines, reading_as_trained
from tests.conftest import manual
from tests.tiny_hf_models import TOKENIZERS

KINDS = (*TOKENIZERS, "prefixed", "split at whitespace", "stripped")
ODD = ("a ▁x ▁▁ b", "▁a", "\u2028x y ", "\x85a", "  Two  spaces\tand ", "(a) 1,000.5%", " . ")


def opened(kind: str, folders: dict[str, Path]) -> Any:
    """A tokenizer of a kind; the last three mark the beginning of a text in another way."""
    source = {"prefixed": "byte_level", "split at whitespace": "unigram", "stripped": "deberta_unigram"}.get(kind, kind)
    tokenizer = AutoTokenizer.from_pretrained(folders[source])
    backend = tokenizer.backend_tokenizer
    if kind == "prefixed":  # as RoBERTa's with add_prefix_space
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "split at whitespace":  # as XLM-R's
        steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif kind == "stripped":  # as DeBERTa-v3's
        backend.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFC()])
    return tokenizer


@cache
def both(kind: str, folder: Path, root: Path) -> tuple[Any, Any]:
    """A tokenizer, and the one that reads masks as in training, saved and opened again."""
    tokenizer = opened(kind, {path.name: path for path in root.iterdir()})
    reading_as_trained(tokenizer).save_pretrained(folder)
    return tokenizer, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=KINDS, scope="module")
def pair(
    request: pytest.FixtureRequest, hf_tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("reading")
    return both(request.param, folder, next(iter(hf_tokenizers.values())).parent)


@settings(max_examples=60)
@given(text=st.one_of(st.sampled_from(ODD), st.text(st.sampled_from("ab.,▁ \t\u2028<é雪"), max_size=30)))
def test_text_without_masks_keeps_its_ids(pair: tuple[Any, Any], text: str) -> None:
    before, after = (tokenizer(text, split_special_tokens=True)["input_ids"] for tokenizer in pair)
    assert after == before


def test_masks_replace_the_tokens_of_words(pair: tuple[Any, Any]) -> None:
    tokenizer, reading = pair
    number = 0
    for line in [line for topic in manual()[5:20] for line in topic.splitlines() if "  " not in line][:100]:
        encoding = tokenizer.backend_tokenizer.encode(line, add_special_tokens=False)
        tokens = ["", *encoding.tokens]
        for place, (start, end) in enumerate(encoding.offsets):
            begin = start + (line[start] == " ")
            begins = line[begin - 1 : begin] in ("", " ") and {"▁", "Ġ"}.isdisjoint(tokens[place : place + 2])
            if begins and line[begin:end].isalpha() and line[end : end + 1] in (" ", "."):
                expected = [*encoding.ids[:place], tokenizer.mask_token_id, *encoding.ids[place + 1 :]]
                found = reading(line[:begin] + reading.mask_token + line[end:], add_special_tokens=False)
                assert found["input_ids"] == expected, (line, begin)
                number += line[end] == "."
    assert number > 20


def test_text_after_a_mask_is_read_alike_after_one_and_two_rewritings(pair: tuple[Any, Any], tmp_path: Path) -> None:
    readers = []
    for name, tokenizer in zip(("stock", "rewritten"), pair, strict=True):
        tokenizer.save_pretrained(tmp_path / name)
        readers.append(HuggingFaceTokenizer(tmp_path / name))
    mask, rewritten = pair[1].mask_token, pair[1]
    number = 0
    for line in [line for topic in manual()[5:20] for line in topic.splitlines()][:50]:
        for variant in masked_lines(line, mask):
            ids = [reader.ids_with_masks(variant, mask) for reader in readers]
            assert ids[1] == ids[0] == rewritten(variant, add_special_tokens=False)["input_ids"], variant
            number += 1
    assert number > 100


def test_the_tokens_of_a_masked_text_have_their_places(pair: tuple[Any, Any], tmp_path: Path) -> None:
    pair[0].save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    text = "The name  <mask>of a value is<mask>, and returned."
    ids, offsets = tokenizer.encoded_with_masks(text, "<mask>")
    assert ids == tokenizer.ids_with_masks(text, "<mask>")
    assert [text[slice(*place)] for place, number in zip(offsets, ids, strict=True) if number == tokenizer.mask_id] == [
        "<mask>",
        "<mask>",
    ]
    assert [start for start, _ in offsets] == sorted(start for start, _ in offsets)
    shown = "".join(text[slice(*place)] for place in offsets)
    assert shown.replace(" ", "") == text.replace(" ", "")


def test_masks_are_put_at_the_beginning_inside_and_before_punctuation() -> None:
    assert masked_lines("The name is bound.", "<mask>") == [
        "<mask> name is bound.",
        "The name <mask> bound.",
        "The name is <mask>.",
        "The name is <mask>und.",
        "The name is bo<mask>.",
    ]
    assert masked_lines("... --", "<mask>") == []
    assert masked_lines("one", "<mask>") == ["<mask>"]


def test_a_tokenizer_that_reads_masks_as_in_training_stays_as_it_is(hf_tokenizers: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hf_tokenizers["word_piece"])
    assert reading_as_trained(tokenizer) is tokenizer
    changed = AutoTokenizer.from_pretrained(hf_tokenizers["unigram"])
    changed.model_max_length, changed.padding_side = 77, "left"
    found = reading_as_trained(changed)
    assert found is not changed
    assert found.special_tokens_map == changed.special_tokens_map
    assert (found.model_max_length, found.padding_side) == (77, "left")
