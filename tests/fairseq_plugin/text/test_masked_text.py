"""Encoding texts with masks."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from mlsm_plugin.fairseq_plugin.text.masked_text import (
    cut_around_masks,
    encode_masked_text,
    ids_between_masks,
    pieces_after_a_gap,
)
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import HuggingFaceBPE, HuggingFaceBPEConfig
from tests.conftest import manual
from tests.tiny_hf_models import TOKENIZERS


@pytest.fixture(scope="module")
def bpe(loaded: SimpleNamespace) -> SentencepieceBPE:
    return SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(loaded.folder / "sentencepiece.bpe.model")))


def manual_lines() -> list[str]:
    """Lines without runs of one character, which can be cut in several ways of equal probability."""
    lines = [line for topic in manual()[5:30] for line in topic.splitlines()]
    return [line for line in lines if not re.search(r"(.)\1{3}", line)][:200]


def ids_of(loaded: SimpleNamespace, text: str) -> list[int]:
    return [loaded.dictionary.index(piece) for piece in loaded.processor.encode(text, out_type=str)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("The statement is here.", ["The statement is here."]),
        ("The <mask> is  <mask> .", ["The", " is", " ."]),
        ("<mask> of it <mask>", ["", " of it", ""]),
        ("<mask><mask>", ["", "", ""]),
        ("", [""]),
    ],
)
@pytest.mark.parametrize("masks", [[900], [900, 901]])
def test_parts_and_masks(
    loaded: SimpleNamespace, bpe: SentencepieceBPE, text: str, parts: list[str], masks: list[int]
) -> None:
    dictionary = loaded.dictionary
    expected = [ids_of(loaded, part) for part in parts]
    assert ids_between_masks(text, bpe, dictionary) == expected
    ids, places = encode_masked_text(text, bpe, dictionary, masks=masks)
    assert (ids[0], ids[-1]) == (dictionary.bos(), dictionary.eos())
    assert len(places) == len(parts) - 1
    assert [ids[place : place + len(masks)] for place in places] == [masks] * len(places)
    without = [id_ for id_ in ids[1:-1] if id_ not in masks]
    assert without == [id_ for part in expected for id_ in part]
    starts = [1, *(place + len(masks) for place in places)]
    assert [ids[start : start + len(part)] for start, part in zip(starts, expected, strict=True)] == expected


def test_text_after_a_mask_has_the_ids_of_training(loaded: SimpleNamespace, bpe: SentencepieceBPE) -> None:
    index, number = loaded.dictionary.index, 0
    for line in manual_lines():
        pieces = loaded.processor.encode(line, out_type=str)
        for place in range(1, len(pieces) - 1):
            before, after = ("".join(part).replace("▁", " ") for part in (pieces[:place], pieces[place + 1 :]))
            found = ids_between_masks(f"{before} <mask>{after}", bpe, loaded.dictionary)
            assert found[1] == [index(piece) for piece in pieces[place + 1 :]], (before, after)
            number += not after.startswith(" ")
    assert number > 1000


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (".", "."),
        (" .", "▁ ."),
        ("\x85b", "b"),  # whitespace for fairseq, not for SentencePiece
        ("\tb", "▁b"),  # whitespace for both
        ("☃☃ b", "☃☃ ▁b"),  # unknown
        ("", ""),
        ("  ", ""),
    ],
)
def test_pieces_after_a_gap(bpe: SentencepieceBPE, text: str, pieces: str) -> None:
    assert pieces_after_a_gap(text, bpe) == pieces.split()


@pytest.mark.parametrize("kind", [*TOKENIZERS, "prefixed"])
def test_hugging_face_tokenizers_read_text_after_a_mask_as_in_training(
    kind: str, hf_tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    folder = hf_tokenizers.get(kind) or with_prefix(hf_tokenizers["byte_level"], tmp_path)
    bpe = HuggingFaceBPE(HuggingFaceBPEConfig(hf_tokenizer=str(folder)))
    number = 0
    for line in manual_lines():
        encoding = bpe.tokenizer.backend.encode(line, add_special_tokens=False)
        symbols, ends = bpe.encode(line).split(), [end for _, end in encoding.offsets]
        for word in re.finditer(r"\w+(?=[.,)])", line):
            if word.end() in ends:
                place = len(ends) - ends[::-1].index(word.end())
                assert pieces_after_a_gap(line[word.end() :], bpe) == symbols[place:], line
                number += 1
    assert number > 100


def with_prefix(source: Path, folder: Path) -> Path:
    """A byte-level tokenizer that puts a space before each text."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save_pretrained(folder)
    return folder


@given(
    parts=st.lists(st.lists(st.integers(10, 99), max_size=12), min_size=2, max_size=4),
    masks=st.sampled_from([[900], [900, 901]]),
    limit=st.integers(4, 40),
)
def test_long_texts_are_cut_and_keep_their_ends_and_all_masks(
    parts: list[list[int]], masks: list[int], limit: int
) -> None:
    ids, places = [0, *parts[0]], []
    for part in parts[1:]:
        places.append(len(ids))
        ids += [*masks, *part]
    ids.append(2)
    apart = places[-1] + len(masks) - places[0]
    if apart > limit - 2 and len(ids) > limit:
        with pytest.raises(
            ValueError, match=f"the masks are {apart} tokens apart, but the model has {limit} positions"
        ):
            cut_around_masks(ids, places, length=len(masks), limit=limit)
        return
    kept, kept_places = cut_around_masks(ids, places, length=len(masks), limit=limit)
    assert len(kept) == min(len(ids), limit)
    assert (kept[0], kept[-1]) == (0, 2)
    offset = places[0] - kept_places[0]
    assert [place - offset for place in places] == kept_places
    assert kept[1:-1] == ids[1 + offset : len(kept) - 1 + offset]
    assert all(kept[place : place + len(masks)] == masks for place in kept_places)
