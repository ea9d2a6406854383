"""Where words begin and end: rules by example, and whole sequences against a slow check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.masking.word_boundaries import LONGEST_WORD, PieceClasses, _say_once, word_boundaries
from tests.core.masking.slow_boundaries import slow_boundaries


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 12), max_size=4),
    words=st.sampled_from([0.0, 0.4, 1.0]),
    ends=st.sampled_from([0.0, 0.5]),
    longest=st.integers(1, 12),
)
def test_sequences_in_a_row_are_as_each_alone(
    seed: int, lengths: list[int], words: float, ends: float, longest: int
) -> None:
    rng = np.random.default_rng(seed)
    punctuation = rng.random(8) < 0.3
    classes = PieceClasses(rng.random(8) < 0.15, rng.random(8) < words, rng.random(8) < ends, punctuation, punctuation)
    sequences = [rng.integers(8, size=length) for length in lengths]
    expected = [slow_boundaries(tokens, classes, longest) for tokens in sequences]
    tokens = np.concatenate([*sequences, np.zeros(0, np.int64)])
    found = word_boundaries(tokens, np.repeat(np.arange(len(lengths)), lengths), classes, longest=longest)
    for flags, number in zip(found, (0, 1), strict=True):
        assert flags.tolist() == [flag for pair in expected for flag in pair[number]]


@pytest.mark.parametrize(
    ("pieces", "begins", "ends"),
    [
        ("▁the ▁end . </s>", "1 1 1 0", "1 1 1 0"),
        ("▁don ' t . ▁No", "1 0 0 1 1", "0 0 1 1 1"),
        ("▁wait . . . ▁( a )", "1 1 1 1 1 0 1", "1 1 1 1 0 1 1"),
        ("ing ▁U . S . </s> ▁it", "0 1 0 0 1 0 1", "1 0 0 1 1 0 1"),
    ],
)
def test_punctuation_at_the_end_of_a_word_is_a_word(pieces: str, begins: str, ends: str) -> None:
    symbols = pieces.split()
    vocabulary = sorted(set(symbols))
    classes = PieceClasses.of_vocabulary(vocabulary, [i for i, piece in enumerate(vocabulary) if piece == "</s>"])
    tokens = np.array([vocabulary.index(piece) for piece in symbols])
    found = word_boundaries(tokens, np.zeros(len(tokens), np.int64), classes)
    assert [" ".join(str(int(flag)) for flag in flags) for flags in found] == [begins, ends]
    assert [list(map(bool, flags)) for flags in found] == [list(flags) for flags in slow_boundaries(tokens, classes)]


def test_tokens_of_long_words_are_words_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    _say_once.cache_clear()
    classes = PieceClasses.of_vocabulary(["</s>", "▁a", "b"], [0])
    words = [[1] + [2] * (LONGEST_WORD - 1), [1] + [2] * LONGEST_WORD, [0], [2] * LONGEST_WORD, [0], [2] * 11]
    tokens = np.array([token for word in words for token in word])
    begins, ends = word_boundaries(tokens, np.zeros(len(tokens), np.int64), classes)
    expected = [1] + [0] * 9 + [1] * 11 + [0] + [0] * 10 + [0] + [1] * 11
    assert begins.astype(int).tolist() == expected
    assert np.flatnonzero(ends).tolist() == [9, *range(10, 21), 31, *range(33, 44)]
    word_boundaries(tokens, np.zeros(len(tokens), np.int64), classes)
    assert len(caplog.messages) == 1
    assert "words of more than 10 tokens, as in languages without spaces between words" in caplog.messages[0]


def test_classes_of_pieces() -> None:
    pieces = ["<s>", "▁the", "s", "▁.", ",", '."', "'", "▁", "▁a,"]
    classes = PieceClasses.of_vocabulary(pieces, [0])
    assert classes.special.tolist() == [True] + [False] * 8
    assert [piece for piece, flag in zip(pieces, classes.begins_word, strict=True) if flag] == [
        "▁the",
        "▁.",
        "▁",
        "▁a,",
    ]
    assert [piece for piece, flag in zip(pieces, classes.punctuation, strict=True) if flag] == ["▁.", ",", '."', "'"]
    marks = [piece for piece, flag in zip(pieces, classes.sentence_punctuation, strict=True) if flag]
    assert marks == ["▁.", ",", '."']


@pytest.mark.parametrize(
    ("pieces", "begins", "ends"),
    [
        ("<s> The Ġlong est Ġword , Ġor . </s>", "0 1 1 0 1 1 1 1 0", "0 1 0 1 1 1 1 1 0"),
        ("<s> the long ##est word , or . </s>", "0 1 1 0 1 1 1 1 0", "0 1 0 1 1 1 1 1 0"),
        ("<s> the lon@@ gest word , or . </s>", "0 1 1 0 1 1 1 1 0", "0 1 0 1 1 1 1 1 0"),
        ("<s> Ġ( a ) ) </s>", "0 1 0 1 1 0", "0 0 1 1 1 0"),
        ("<s> Ġunju lon ##g ##est , or . </s>", "0 1 1 0 0 1 1 1 0", "0 1 0 0 1 1 1 1 0"),  # WordPiece, Maltese
    ],
)
def test_words_of_other_tokenizers_are_found(pieces: str, begins: str, ends: str) -> None:
    symbols = pieces.split()
    vocabulary = ["<s>", "</s>", *sorted(set(symbols) - {"<s>", "</s>"})]
    classes = PieceClasses.of_vocabulary(vocabulary, [0, 1])
    tokens = np.array([vocabulary.index(piece) for piece in symbols])
    found = word_boundaries(tokens, np.zeros(len(tokens), np.int64), classes)
    assert [" ".join(str(int(flag)) for flag in flags) for flags in found] == [begins, ends]
    marks = {piece for piece, flag in zip(vocabulary, classes.punctuation, strict=True) if flag}
    assert marks == set(symbols) & {",", ".", "Ġ(", ")"}


def test_vocabularies_without_marks_of_words_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing in the vocabulary marks where words begin or end"):
        PieceClasses.of_vocabulary(["<s>", "464", "262", "##", "@@"], [0])
