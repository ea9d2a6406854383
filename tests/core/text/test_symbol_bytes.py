"""The bytes of the symbols of a dataset: together they are the text that its tokenizer has read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.files.model_files import FOLDER_NAME, MODEL_NAME
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.symbol_bytes import SEPARATOR, SymbolBytes
from tests.core.text.datasets_of_tokenizers import hf_dataset, sentencepiece_dataset, write_symbols
from tests.tiny_hf_models import OWN_TOKENS, add_own_tokens

ODD = [
    "Ünïcödé ﬁ 雪",
    "e\u0301 a\u0308\u0327",
    "👩\u200d👧 😀",
    "zero\u200bwidth",
    "  two  spaces ",
    "don't",
    "ĠĊ ▁ <0x41> ##x @@",
]
TEXTS = st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"]), max_size=40))


@pytest.fixture(scope="module")
def datasets(
    hf_tokenizers: dict[str, Path], english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[object, SymbolBytes]]:
    """The tokenizer of each kind, and the bytes of its dataset."""
    root = tmp_path_factory.mktemp("datasets")
    opened: dict[str, object] = {kind: hf_dataset(hf_tokenizers[kind], root / kind) for kind in hf_tokenizers}
    opened["sentencepiece"] = sentencepiece_dataset(english_text[0], root / "sentencepiece")
    opened["fallback"] = sentencepiece_dataset(english_text[0], root / "fallback", byte_fallback=True)
    return {kind: (tokenizer, SymbolBytes.of_dataset(root / kind)) for kind, tokenizer in opened.items()}


def joined(symbols: SymbolBytes, ids: list[int]) -> bytes:
    return b"".join(symbols.table[number] for number in ids)


@pytest.mark.parametrize("kind", ["byte_level", "modern_byte_level"])
@settings(max_examples=100)
@given(text=TEXTS)
def test_byte_level_symbols_are_the_text(kind: str, datasets: dict[str, tuple[object, SymbolBytes]], text: str) -> None:
    tokenizer, symbols = datasets[kind]
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    ids = tokenizer.fairseq_ids[tokenizer.ids_of(text)].tolist()
    assert joined(symbols, ids).decode() == text
    assert not symbols.adds_space


@pytest.mark.parametrize("kind", ["sentencepiece", "fallback"])
@settings(max_examples=100)
@given(text=TEXTS)
def test_pieces_are_the_text_that_sentencepiece_decodes(
    kind: str, datasets: dict[str, tuple[object, SymbolBytes]], text: str
) -> None:
    processor, symbols = datasets[kind]
    pieces = processor.encode(text)  # type: ignore[attr-defined]
    if kind == "fallback":
        assert 0 not in pieces
    known = [number for number in pieces if number]
    expected = processor.decode(known)  # type: ignore[attr-defined]
    # without its unknown pieces, a text can begin with several spaces, which SentencePiece leaves out
    found = joined(symbols, [number + 1 for number in known]).decode("utf-8", "replace")
    assert found.lstrip(" ") == expected.lstrip(" ")
    assert symbols.adds_space


def test_pieces_of_words_and_special_symbols(datasets: dict[str, tuple[object, SymbolBytes]]) -> None:
    tokenizer, symbols = datasets["word_piece"]
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    ids = tokenizer.fairseq_ids[tokenizer.ids_of("Expressions, don't")].tolist()
    assert joined(symbols, ids) == b" expressions , don ' t"
    assert [symbols.table[number] for number in (0, 1, 2, 3, -1)] == [SEPARATOR] * 5
    assert len(symbols.table) == len(tokenizer.symbols) + 5


@pytest.mark.parametrize("kind", ["byte_level", "word_piece", "unigram"])
def test_tokens_of_the_own_list_are_their_text(kind: str, hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    add_own_tokens(hf_tokenizers[kind], tmp_path / "own")
    tokenizer = hf_dataset(tmp_path / "own", tmp_path / "data")
    symbols = SymbolBytes.of_dataset(tmp_path / "data")
    tokens = tokenizer.tokens_by_id()
    names = {tokens[int(tokenizer.hf_ids[number])]: content for number, content in enumerate(symbols.table)}
    assert [names[token] for token in OWN_TOKENS] == [token.encode() for token in OWN_TOKENS]


def test_datasets_that_cannot_be_read_are_named(hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    write_symbols(tmp_path / "bare", ["a", "b"])
    with pytest.raises(ValueError, match=rf"bare has no tokenizer \({MODEL_NAME} or {FOLDER_NAME}\), so its ids"):
        SymbolBytes.of_dataset(tmp_path / "bare")
    hf_dataset(hf_tokenizers["byte_level"], tmp_path / "data")
    shutil.copytree(tmp_path / "data" / FOLDER_NAME, tmp_path / "bare" / FOLDER_NAME)
    with pytest.raises(ValueError, match=r"bare.dict.txt was not made from the tokenizer of"):
        SymbolBytes.of_dataset(tmp_path / "bare")
