"""Our ids, compared with fairseq's own encoding line by line."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.text.unknown_tokens import UnknownTokens
from mlsm_plugin.fairseq_plugin.text.binarize import encode_in_order, make_batches

# Any text, with the characters that break tokenizers and the words that mean something to fairseq more often.
ODD = st.sampled_from(["\x85", "\x00", "\u2028", "\u00a0", "\u200b", "\u2581", "\u2585", "☃", "<mask>", "<s>", "</s>"])
ODD_WORDS = st.sampled_from(["<pad>", "<unk>", "madeupword0000", "#fairseq:overwrite", "the ", " class", "Python"])
LINES = st.lists(st.one_of(ODD, ODD_WORDS, st.text(max_size=8)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def alphabet(loaded) -> str:
    """Characters that have a piece, and the space."""
    pieces = (loaded.processor.id_to_piece(i) for i in range(len(loaded.processor)))
    return "".join(sorted({piece for piece in pieces if len(piece) == 1 and piece != "▁"} | {" "}))


def fairseq_ids(loaded, line: str) -> list[int]:
    text = " ".join(loaded.processor.encode(line, out_type=str))
    return loaded.dictionary.encode_line(text, add_if_not_exist=False).tolist()


@settings(max_examples=400, deadline=None)
@given(line=LINES.map(str.strip).filter(bool))
def test_ids_equal_those_of_fairseq(loaded, line):
    batch = loaded.encoder.encode_batch([line])
    expected = fairseq_ids(loaded, line)
    if len(expected) == 1:
        assert (batch.dropped, len(batch.ids)) == (1, 0)
    else:
        assert batch.ids.tolist() == expected
        assert batch.lengths.tolist() == [len(expected)]
        assert batch.unknown.unknown == expected.count(loaded.dictionary.unk())
        assert not {loaded.dictionary.bos(), loaded.dictionary.pad()} & set(expected)
        assert expected.index(loaded.dictionary.eos()) == len(expected) - 1


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_ids_to_pieces_to_text_is_the_normalized_text(loaded, alphabet, data):
    line = data.draw(st.text(st.sampled_from(alphabet), max_size=60).map(str.strip).filter(bool))
    ids = loaded.encoder.encode_batch([line]).ids[:-1]
    assert loaded.dictionary.unk() not in ids
    text = "".join(loaded.dictionary[int(i)] for i in ids).replace("▁", " ").strip()
    assert text == loaded.processor.normalize(line).replace("▁", " ").strip()
    assert loaded.dictionary.string(ids.tolist(), bpe_symbol="sentencepiece") == text


def test_the_whole_corpus_line_by_line(loaded, documents):
    lines = [line for document in documents for line in document]
    batch = loaded.encoder.encode_batch(lines)
    sentences = np.split(batch.ids, np.cumsum(batch.lengths)[:-1])
    assert len(sentences) == len(lines)
    for line, sentence in zip(lines, sentences, strict=True):
        assert sentence.tolist() == fairseq_ids(loaded, line)


def test_whitespace_in_an_unknown_stretch_is_split_as_in_fairseq(loaded):
    batch = loaded.encoder.encode_batch(["a\u2603\x85\u2603b"])
    assert batch.ids.tolist() == fairseq_ids(loaded, "a\u2603\x85\u2603b")
    assert batch.unknown == UnknownTokens(
        tokens=len(batch.ids) - 1, unknown=2, characters=Counter({"\u2603": 2}), all_characters=4
    )


def test_blank_lines_collapse_and_lines_without_tokens_are_dropped(loaded):
    lines = ["", "one", "\u200b", "two", "", "", "\u200b", "", "three", ""]
    batch = loaded.encoder.encode_batch(lines)
    end = loaded.dictionary.eos()
    one, two, three = (fairseq_ids(loaded, word) for word in ("one", "two", "three"))
    assert batch.ids.tolist() == [*one, *two, end, *three]
    assert batch.lengths.tolist() == [len(one), len(two), 1, len(three)]
    assert (batch.boundary_before, batch.boundary_after, batch.dropped) == (True, True, 2)


def test_a_batch_of_blank_lines(loaded):
    batch = loaded.encoder.encode_batch(["", ""])
    assert (len(batch.ids), len(batch.lengths), batch.boundary_before, batch.boundary_after) == (0, 0, False, True)


def test_text_is_read_only_as_fast_as_it_is_encoded(loaded, monkeypatch):
    monkeypatch.setattr("mlsm_plugin.fairseq_plugin.text.binarize.BATCH_CHARACTERS", 100)
    read = 0

    def lines():
        nonlocal read
        for _ in range(2000):
            read += 1
            yield "some words of a sentence that is encoded"

    batches = encode_in_order(loaded.encoder, lines(), workers=2)
    next(batches)
    assert read < 100
    assert sum(len(batch.lengths) for batch in batches) < 2000 == read
    assert sum(map(len, make_batches(["x"] * 500))) == 500


def test_a_dead_worker_is_an_error_not_a_hang(loaded, monkeypatch):
    tokenizer = "mlsm_plugin.fairseq_plugin.text.text_tokenizer.TextTokenizer"
    monkeypatch.setattr(f"{tokenizer}.encode_batch", lambda *_: os._exit(9))
    with pytest.raises(OSError, match="a worker process was killed"):
        list(encode_in_order(loaded.encoder, ["word"] * 10, workers=2))
