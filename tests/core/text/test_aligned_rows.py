"""Rows of ids that another tokenizer reads, against a slow oracle that reads the texts themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mlsm_plugin.core.text.aligned_rows import RowAligner
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.symbol_bytes import SymbolBytes
from tests.core.text.datasets_of_tokenizers import hf_dataset, sentencepiece_dataset
from tests.core.text.test_symbol_bytes import ODD
from tests.core.text.test_token_places import slow_places

Spans = list[tuple[int, int]]
TEXTS = st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30))
OTHERS = ["word_piece", "byte_level", "modern_byte_level", "unigram"]
BEGIN, PAD, END, UNKNOWN = range(4)


@pytest.fixture(scope="module")
def root(
    hf_tokenizers: dict[str, Path], english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    root = tmp_path_factory.mktemp("datasets")
    for kind in hf_tokenizers:
        hf_dataset(hf_tokenizers[kind], root / kind)
    sentencepiece_dataset(english_text[0], root / "sentencepiece")
    return root


class Read:
    """A dataset's tokenizer, the other one, and the library's way to read with both."""

    def __init__(self, dataset: Path, other: Path) -> None:
        self.other = AutoTokenizer.from_pretrained(other)
        lines = (dataset / "dict.txt").read_text(encoding="utf-8").splitlines()
        self.pieces = [line.removesuffix(" 1") for line in lines]
        self.symbols = SymbolBytes.of_dataset(dataset)
        self.aligner = RowAligner(self.symbols, HuggingFaceTokenizer(other))

    def other_ids(self, text: str) -> tuple[list[int], Spans]:
        read = self.other(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        special = set(self.other.all_special_ids)
        ids = [self.other.unk_token_id if number in special else number for number in read["input_ids"]]
        return ids, read["offset_mapping"]

    def expected(self, text: str, spans: Spans) -> tuple[list[int], list[int]]:
        """The other ids of one text between BOS and EOS, and the place of each of the tokens in ``spans``."""
        ids, other_spans = self.other_ids(text)
        places = slow_places(spans, other_spans, text)
        places = [-1 if place >= 0 and ids[place] == self.other.unk_token_id else place for place in places]
        visible = [number for number, (begin, end) in enumerate(spans) if text[begin:end].strip()]
        for number, (begin, end) in enumerate(spans):
            if not text[begin:end].strip() and visible:
                places[number] = places[min((n for n in visible if n > number), default=visible[-1])]
        row = [self.other.cls_token_id, *ids, self.other.sep_token_id]
        return row, [0, *(place + (place >= 0) for place in places), len(row) - 1]


@pytest.fixture(scope="module")
def readers(root: Path, hf_tokenizers: dict[str, Path]) -> dict[tuple[str, str], Read]:
    kinds = ["sentencepiece", "byte_level", "word_piece", "unigram"]
    return {(kind, other): Read(root / kind, hf_tokenizers[other]) for kind in kinds for other in OTHERS}


@pytest.mark.parametrize("other", OTHERS)
@settings(max_examples=60)
@given(text=TEXTS)
def test_bytes_of_any_text_belong_to_the_tokens_of_the_text(
    other: str, readers: dict[tuple[str, str], Read], root: Path, text: str
) -> None:
    """A byte-level tokenizer reads a text as it is, and its library says where the tokens are."""
    read = readers["byte_level", other]
    tokenizer = HuggingFaceTokenizer(root / "byte_level" / "hf_tokenizer")
    ids, spans = tokenizer.encoded_text(text)
    ids = tokenizer.fairseq_ids[ids].tolist()
    aligned = read.aligner.read(np.array([[BEGIN, *ids, END]]))
    row, places = read.expected(text, spans)
    assert aligned.ids[0].tolist() == row
    assert aligned.places.tolist() == [places]


def slow_surfaces(kind: str, pieces: list[str]) -> tuple[str, Spans]:
    """The text of pieces that hold whole characters, and where they are, without a space at the beginning."""
    surfaces = [piece.replace("\u2581", " ") for piece in pieces]
    if kind == "word_piece":
        goes_on = [piece.startswith("##") and len(piece) > 2 for piece in pieces]
        surfaces = [piece[2:] if goes else f" {piece}" for piece, goes in zip(pieces, goes_on, strict=True)]
    text = "".join(surfaces)
    shift = int(text.startswith(" "))
    ends = np.cumsum([len(surface) for surface in surfaces]).tolist()
    begins = [end - len(surface) for end, surface in zip(ends, surfaces, strict=True)]
    clipped = [(max(0, begin - shift), max(0, end - shift)) for begin, end in zip(begins, ends, strict=True)]
    return text[shift:], clipped


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", ["sentencepiece", "word_piece", "unigram"])
@settings(max_examples=40)
@given(data=st.data())
def test_pieces_of_any_vocabulary_belong_to_the_tokens_of_their_text(
    kind: str, other: str, readers: dict[tuple[str, str], Read], data: st.DataObject
) -> None:
    read = readers[kind, other]
    numbers = data.draw(st.lists(st.integers(0, len(read.pieces) - 1), min_size=1, max_size=12))
    pieces = [read.pieces[number] for number in numbers]
    ids = [number + 4 for number in numbers]
    assume(not any(piece.startswith("[hf:") for piece in pieces))  # stands for a token with white space
    text, spans = slow_surfaces(kind, pieces)
    assume(not any(token in text for token in read.other.all_special_tokens))
    aligned = read.aligner.read(np.array([[BEGIN, *ids, END, PAD]]))
    row, places = read.expected(text, spans)
    assert aligned.ids[0].tolist() == row
    assert aligned.places.tolist() == [[*places, -1]]


@pytest.mark.parametrize("other", OTHERS)
def test_special_symbols_cut_rows_into_texts(other: str, readers: dict[tuple[str, str], Read], root: Path) -> None:
    read = readers["byte_level", other]
    tokenizer = HuggingFaceTokenizer(root / "byte_level" / "hf_tokenizer")
    first, second = (tokenizer.fairseq_ids[tokenizer.ids_of(text)].tolist() for text in ("The value", " of names"))
    mask = len(read.symbols.table) - 1
    rows = [[BEGIN, *first, END, *first, UNKNOWN, *second, END], [BEGIN, *first, mask, END], first]
    width = max(map(len, rows))
    aligned = read.aligner.read(np.array([row + [PAD] * (width - len(row)) for row in rows]))
    begin, end = read.other.cls_token_id, read.other.sep_token_id
    whole, rest = read.other_ids("The value")[0], read.aligner.tokenizer.encoded([" of names"], after_a_gap=True)[0][0]
    expected = [
        [begin, *whole, end, *whole, read.other.unk_token_id, *rest, end],
        [begin, *whole, read.other.mask_token_id, end],
        whole,
    ]
    assert [ids.tolist() for ids in aligned.ids] == expected
    flat = np.concatenate(aligned.ids)
    for row, places in zip(rows, aligned.places.tolist(), strict=True):
        found = [int(flat[place]) for place in places[: len(row)]]
        roles = {BEGIN: begin, END: end, UNKNOWN: read.other.unk_token_id, mask: read.other.mask_token_id}
        assert [number for number, index in zip(found, row, strict=True) if index in roles] == [
            roles[index] for index in row if index in roles
        ]
        assert places[len(row) :] == [-1] * (width - len(row))
    assert aligned.places[2, : len(first)].min() == sum(map(len, expected[:2]))  # a row without BOS is not mixed up


def test_parts_of_characters_are_read_alone(readers: dict[tuple[str, str], Read], root: Path) -> None:
    """Rows that end and begin within a character do not make one together."""
    read = readers["byte_level", "modern_byte_level"]
    tokenizer = HuggingFaceTokenizer(root / "byte_level" / "hf_tokenizer")
    ids = tokenizer.fairseq_ids[tokenizer.ids_of("雪")].tolist()
    assert len(ids) == 3
    aligned = read.aligner.read(np.array([[BEGIN, *ids[:2]], [*ids[2:], PAD, PAD], [*ids]]))
    texts = [read.other.decode(row[row != read.other.cls_token_id]) for row in aligned.ids]
    assert texts == ["\ufffd\ufffd", "\ufffd", "雪"]
    assert aligned.places[2].tolist() == [len(np.concatenate(aligned.ids)) - 1] * 3


def test_roles_that_the_other_tokenizer_lacks_are_left_out(
    root: Path, hf_tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(hf_tokenizers["byte_level"])
    theirs.unk_token = None
    theirs.mask_token = None
    theirs.save_pretrained(tmp_path)
    read = Read(root / "word_piece", tmp_path)
    mask = len(read.symbols.table) - 1
    aligned = read.aligner.read(np.array([[BEGIN, UNKNOWN, mask, 300, END]]))
    assert aligned.places[0, 1:3].tolist() == [-1, -1]
    assert [aligned.ids[0][0], aligned.ids[0][-1]] == [theirs.cls_token_id, theirs.sep_token_id]
    assert theirs.pad_token_id not in aligned.ids[0]


def test_text_that_the_other_tokenizer_does_not_know_is_refused(
    readers: dict[tuple[str, str], Read], root: Path, hf_tokenizers: dict[str, Path]
) -> None:
    tokenizer = HuggingFaceTokenizer(root / "byte_level" / "hf_tokenizer")
    aligner = RowAligner(readers["byte_level", "word_piece"].symbols, HuggingFaceTokenizer(hf_tokenizers["word_piece"]))
    rows = np.array([[BEGIN, *tokenizer.fairseq_ids[tokenizer.ids_of("a name 日本 is")].tolist(), END]])
    places = aligner.read(rows).places[0]
    assert 2 < np.count_nonzero(places == -1) < len(places) - 3
    with pytest.raises(
        ValueError, match=r"of 1,\d\d\d tokens have characters that .* does not know, such as in '.*日本"
    ):
        aligner.read(np.tile(rows, (200, 1)))


def test_the_fingerprint_is_of_both_tokenizers(readers: dict[tuple[str, str], Read]) -> None:
    prints = {pair: read.aligner.fingerprint for pair, read in readers.items()}
    assert len(set(prints.values())) == len(prints)
    read = readers["unigram", "byte_level"]
    assert RowAligner(read.symbols, read.aligner.tokenizer).fingerprint == prints["unigram", "byte_level"]
