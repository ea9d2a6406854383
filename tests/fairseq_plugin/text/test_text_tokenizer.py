"""Both kinds of tokenizers behind one interface."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary

from mlsm_plugin.core.files.atomic_files import sha256_of_files
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import (
    HuggingFaceTextTokenizer,
    SentencePieceTokenizer,
    TextTokenizer,
    open_tokenizer,
)

KINDS = ["sentencepiece", "word_piece", "byte_level", "unigram"]
TEXTS = ["The value of an expression.", "unextraordinary \u2603", "<mask> </s> <s>"]


@pytest.fixture
def name_of(tokenizer: Path, hf_tokenizers: dict[str, Path]) -> Callable[[str], str]:
    """What a user writes for each kind."""
    return lambda kind: str(tokenizer) if kind == "sentencepiece" else f"hf:{hf_tokenizers[kind]}"


def symbols_of(opened: TextTokenizer, text: str) -> list[str]:
    """What the tokenizer by itself says, without our encoder of lines."""
    if isinstance(opened, SentencePieceTokenizer):
        return list(opened.processor.encode(text, out_type=str))
    assert isinstance(opened, HuggingFaceTextTokenizer)
    return opened.tokenizer.symbols_of(text)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_symbols_in_the_dictionary(kind: str, name_of: Callable[[str], str]) -> None:
    opened = open_tokenizer(name_of(kind))
    assert type(opened) is (SentencePieceTokenizer if kind == "sentencepiece" else HuggingFaceTextTokenizer)
    eos = opened.dictionary.eos()
    for text in TEXTS:
        ids = opened.encode_batch([text]).ids
        assert ids.dtype == np.int64
        assert ids.tolist() == [*map(opened.dictionary.index, symbols_of(opened, text)), eos]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_opens_as_the_same_tokenizer(kind: str, name_of: Callable[[str], str], tmp_path: Path) -> None:
    opened = open_tokenizer(name_of(kind))
    opened.write_to(tmp_path)
    again = open_tokenizer(tmp_path)
    assert type(again) is type(opened)
    assert again.fingerprint == opened.fingerprint
    assert again.dictionary.symbols == opened.dictionary.symbols
    assert Dictionary.load(str(tmp_path / "dict.txt")).symbols == opened.dictionary.symbols
    for text in TEXTS:
        assert again.encode_batch([text]).ids.tolist() == opened.encode_batch([text]).ids.tolist()
    second = tmp_path / "second"
    second.mkdir()
    again.write_to(second)
    assert (second / "dict.txt").read_bytes() == (tmp_path / "dict.txt").read_bytes()


def test_fingerprints_tell_tokenizers_apart(name_of: Callable[[str], str], tokenizer: Path) -> None:
    fingerprints = {kind: open_tokenizer(name_of(kind)).fingerprint for kind in KINDS}
    assert len(set(fingerprints.values())) == len(KINDS)
    assert fingerprints["sentencepiece"] == sha256_of_files(tokenizer / "sentencepiece.bpe.model")


def test_a_dictionary_of_another_tokenizer_is_refused(hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    HuggingFaceTextTokenizer(hf_tokenizers["word_piece"]).write_to(tmp_path)
    HuggingFaceTokenizer(hf_tokenizers["word_piece"]).check_dictionary(tmp_path)
    shutil.rmtree(tmp_path / "hf_tokenizer")
    shutil.copytree(hf_tokenizers["unigram"], tmp_path / "hf_tokenizer")
    message = rf"dict\.txt was not made from the tokenizer of {tmp_path}/hf_tokenizer; binarize the text with --tok"
    with pytest.raises(ValueError, match=message):
        open_tokenizer(tmp_path)
    (tmp_path / "dict.txt").unlink()
    with pytest.raises(ValueError, match=r"dict\.txt does not exist; `mlsm binarize` makes it"):
        open_tokenizer(tmp_path)


def test_folders_without_a_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path}/sentencepiece\.bpe\.model does not exist; `mlsm tokenizer"):
        open_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no readable tokenizer"):
        open_tokenizer(f"hf:{tmp_path}")
