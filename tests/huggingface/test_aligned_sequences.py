"""The text of sequences in the tokens of another tokenizer, with places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.token_places import places_of
from mlsm_plugin.huggingface.aligned_sequences import AlignedSequences, write_aligned
from mlsm_plugin.huggingface.text_sequences import write_text_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.conftest import made_once
from tests.core.text.test_token_places import slow_places
from tests.tiny_hf_models import TOKENIZERS, make_tokenizer

PAIRS = [("byte_level", "word_piece"), ("word_piece", "unigram"), ("unigram", "modern_byte_level")]


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> dict[str, Path]:
    def make(root: Path) -> None:
        for kind in TOKENIZERS:
            make_tokenizer(kind, english_text[1], root / kind)

    root = made_once(tmp_path_factory, "aligned", make)
    return {kind: root / kind for kind in TOKENIZERS}


@pytest.mark.parametrize(("kind", "other_kind"), PAIRS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30))
def test_tokens_share_their_characters_whatever_the_script(
    tokenizers: dict[str, Path], kind: str, other_kind: str, text: str
) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizers[kind])
    other = HuggingFaceTokenizer(tokenizers[other_kind])
    _, spans = tokenizer.encoded_text(text)
    _, other_spans = other.encoded_text(text)
    assert places_of(spans, other_spans, text).tolist() == slow_places(spans, other_spans, text)


def written(
    folder: Path,
    tokenizers: dict[str, Path],
    pair: tuple[str, str],
    lines: list[str],
    *,
    most: int = 64,
    length: int = 12,
) -> tuple[TokenSequences, AlignedSequences]:
    text = folder / "text.txt"
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer, other = (HuggingFaceTokenizer(tokenizers[kind]) for kind in pair)
    rates = {"max_unk_rate": 1.0}
    sequences, _ = write_text_sequences([text], tokenizer, folder / "tokens", max_length=12, **rates)
    aligned = write_aligned(
        [text], sequences, tokenizer, other, folder / "other", folder / "places", max_length=most, **rates
    )
    return sequences, aligned


@pytest.mark.parametrize("pair", PAIRS)
def test_each_sequence_is_the_same_text(
    tmp_path: Path, tokenizers: dict[str, Path], pair: tuple[str, str], english_text: tuple[Path, Path]
) -> None:
    english = english_text[0].read_text(encoding="utf-8").splitlines()[:60]
    lines = [*english, "", "x" * 90, "Nämen und \u00c9t\u00e9"]
    sequences, aligned = written(tmp_path, tokenizers, pair, lines)
    tokenizer, other = (HuggingFaceTokenizer(tokenizers[kind]) for kind in pair)
    assert len(sequences) == len(aligned.sequences) == len(aligned.places)
    everything = [ids for index in range(len(sequences)) for ids in aligned.sequences[index][1:-1].tolist()]
    spaced = [f" {line}" if before and line else line for before, line in zip(["", *lines], lines, strict=False)]
    assert everything == [number for line in spaced if line for number in other.ids_of(line)]
    for index in range(len(sequences)):
        positions = aligned.positions_of(index)
        assert (positions[[0, -1]] == -1).all()
        flat = np.concatenate([aligned.sequences[number] for number in range(len(sequences))])
        for token, position in zip(sequences[index], positions, strict=True):
            if position >= 0:
                piece = tokenizer.backend.decode([int(token)]).strip().lower()
                other_piece = other.backend.decode([int(flat[position])]).strip().lower().removeprefix("##")
                if piece and other_piece:  # unknown tokens are empty
                    assert not piece.isascii() or not other_piece.isascii() or set(piece) & set(other_piece)


@pytest.mark.parametrize("text", ["the name of a value\n", "the name\na value\nis bound\n", "the value\na value\n"])
def test_sequences_of_another_text_are_refused(tmp_path: Path, tokenizers: dict[str, Path], text: str) -> None:
    sequences, _ = written(tmp_path, tokenizers, PAIRS[0], ["the name", "a value"])
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    tokenizer, other = (HuggingFaceTokenizer(tokenizers[kind]) for kind in PAIRS[0])
    folders = (tmp_path / "again", tmp_path / "places of it")
    with pytest.raises(ValueError, match="the sequences are not those of this text with this tokenizer"):
        write_aligned([tmp_path / "text.txt"], sequences, tokenizer, other, *folders, max_length=64, max_unk_rate=1.0)
    assert not any(folder.exists() for folder in folders)


def test_parts_have_their_own_positions(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    _, aligned = written(tmp_path, tokenizers, PAIRS[0], ["the name of a value", "is bound to a name", "a value"])
    part = aligned.part(1, len(aligned.places))
    first = aligned.sequences.starts[1]
    for index in range(len(part.places)):
        whole = aligned.positions_of(index + 1)
        np.testing.assert_array_equal(part.positions_of(index), np.where(whole < 0, -1, whole - first))


def test_what_the_other_model_cannot_read_has_no_place(
    tmp_path: Path, tokenizers: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, aligned = written(tmp_path, tokenizers, PAIRS[0], ["the name of a value is bound to a name"] * 3, most=6)
    assert max(len(aligned.sequences[index]) for index in range(len(aligned.places))) == 6
    positions = np.concatenate([aligned.positions_of(index) for index in range(len(aligned.places))])
    assert positions.max() < aligned.sequences.num_tokens
    assert "longer than 6 tokens of the auxiliary model; tokens after them are never masked" in caplog.text


def test_white_space_alone_is_no_sign_of_another_text(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    sequences, aligned = written(tmp_path, tokenizers, PAIRS[0], ["the  name  of  a  value"])
    tokens = HuggingFaceTokenizer(tokenizers[PAIRS[0][0]]).tokens_by_id()
    spaces = [tokens[number] == "Ġ" for number in sequences[0][1:-1]]
    assert 0.1 < np.mean(spaces) < 0.9
    np.testing.assert_array_equal(aligned.positions_of(0)[1:-1] < 0, spaces)


def test_unknown_tokens_are_no_places(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    sequences, aligned = written(tmp_path, tokenizers, PAIRS[0], ["a 日本 a", "日本"])
    other = HuggingFaceTokenizer(tokenizers[PAIRS[0][1]])
    ids = [number for index in range(len(sequences)) for number in aligned.sequences[index]]
    assert ids.count(other.unknown_id) == 4
    positions = np.concatenate([aligned.positions_of(index) for index in range(len(sequences))])
    assert len(positions) > 10
    [name] = {other.tokens_by_id()[ids[position]] for position in positions if position >= 0}
    assert name == "a"


def test_tokenizers_that_read_different_texts_are_refused(
    tmp_path: Path, tokenizers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = HuggingFaceTokenizer.encoded

    def without_places(self: HuggingFaceTokenizer, texts: list[str]) -> object:
        rows = usual(self, texts)
        return [(ids, [(0, 0)] * len(ids)) for ids, _ in rows] if "word_piece" in str(self.folder) else rows

    monkeypatch.setattr(HuggingFaceTokenizer, "encoded", without_places)
    with pytest.raises(
        ValueError, match="tokens have no token of the auxiliary model at their characters, such as in 'the"
    ):
        written(tmp_path, tokenizers, PAIRS[0], ["the name of a value"])
    assert not (tmp_path / "other").exists()
