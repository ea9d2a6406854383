"""Sentinels in the dictionary and in texts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fairseq.data import Dictionary
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.fairseq_plugin.text.masked_text import (
    dictionary_with_sentinels,
    encode_with_sentinels,
    sentinel_symbols,
)

NUMBER = 5
PIECES = ["▁", "▁a", "▁an", "n", "▁n", ".", "▁.", "a"]


class Letters:
    """A tokenizer: every word is ``▁`` with its first character, then its other characters."""

    def encode(self, text: str) -> str:
        return " ".join(piece for word in text.split() for piece in ("▁" + word[0], *word[1:]))


class Whole:
    """A tokenizer of which each text is one piece."""

    def encode(self, text: str) -> str:
        return "▁" + text


@pytest.fixture(scope="module")
def dictionary() -> Dictionary:
    made = Dictionary()
    for symbol in [*PIECES, *sentinel_symbols(NUMBER)]:
        made.add_symbol(symbol)
    return made


def symbols_in(text: str, dictionary: Dictionary, bpe: Letters | Whole | None = None) -> list[str]:
    return [dictionary[id_] for id_ in encode_with_sentinels(text, bpe or Letters(), dictionary, NUMBER)]


def test_sentinels_come_after_the_pieces(loaded: SimpleNamespace) -> None:
    assert sentinel_symbols(3) == ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    dictionary, ids = dictionary_with_sentinels(loaded.folder, 3)
    size = len(loaded.dictionary)
    assert ids.tolist() == [size, size + 1, size + 2]
    assert [dictionary[int(id_)] for id_ in ids] == sentinel_symbols(3)
    assert dictionary.symbols[:size] == loaded.dictionary.symbols
    assert dictionary.count[size:] == [0, 0, 0]
    assert np.array_equal(dictionary_with_sentinels(str(loaded.folder), 0)[1], np.zeros(0))


def test_a_folder_without_a_dictionary_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"dict\.txt is missing \(write one: `mlsm binarize`\)"):
        dictionary_with_sentinels(tmp_path, 3)


@pytest.mark.parametrize(
    ("text", "symbols"),
    [
        ("", ""),
        ("an a", "▁a n ▁a"),
        ("a <extra_id_0> an <extra_id_3>", "▁a <extra_id_0> ▁a n <extra_id_3>"),
        ("<extra_id_2><extra_id_0>  <extra_id_1>", "<extra_id_2> <extra_id_0> <extra_id_1>"),
        # what follows without a blank is the rest of a word, or punctuation
        ("a<extra_id_0>n a", "▁a <extra_id_0> n ▁a"),
        ("<extra_id_0>.", "<extra_id_0> ."),
        ("<extra_id_0> .", "<extra_id_0> ▁."),
        ("n<extra_id_0>", "▁n <extra_id_0>"),
    ],
)
def test_sentinels_stand_where_they_are_written(dictionary: Dictionary, text: str, symbols: str) -> None:
    assert symbols_in(text, dictionary) == symbols.split()


def test_the_rest_of_a_word_has_no_mark_of_a_word(dictionary: Dictionary) -> None:
    assert symbols_in("<extra_id_0>a", dictionary, Whole()) == ["<extra_id_0>", "a"]
    assert symbols_in("<extra_id_0>n", dictionary, Whole()) == ["<extra_id_0>", "n"]
    assert symbols_in("<extra_id_0>an", dictionary, Whole()) == ["<extra_id_0>", "<unk>"]  # only ▁an is a piece


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(NUMBER)), st.lists(st.sampled_from(["a", "n a", "an .", ""]), min_size=2, max_size=6))
def test_texts_between_sentinels_are_encoded_as_alone(order: list[int], parts: list[str]) -> None:
    made = Dictionary()
    for symbol in [*PIECES, *sentinel_symbols(NUMBER)]:
        made.add_symbol(symbol)
    marks = [f"<extra_id_{number}>" for number in order[: len(parts) - 1]]
    text = " ".join(word for pair in zip(parts, [*marks, ""], strict=True) for word in pair)
    both = zip(parts, [*marks, ""], strict=True)
    expected = [symbol for part, mark in both for symbol in (*Letters().encode(part).split(), mark)]
    assert symbols_in(text, made) == [symbol for symbol in expected if symbol]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a <extra_id_5>", "<extra_id_5> is not one of the 5 sentinels; use <extra_id_0> to <extra_id_4>"),
        ("a <extra_id_01>", "<extra_id_01> is not one of the 5 sentinels"),  # would be an unknown symbol
        ("<extra_id_12345678901234567890>", "<extra_id_12345678901234567890> is not one of the 5 sentinels"),
        ("<extra_id_1> a <extra_id_1>", "<extra_id_1> occurs twice; give each gap its own sentinel"),
    ],
)
def test_sentinels_that_cannot_be_are_refused(dictionary: Dictionary, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_with_sentinels(text, Letters(), dictionary, NUMBER)
