"""A Hugging Face tokenizer as fairseq's BPE."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
from fairseq.data.encoders import build_bpe

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import SPECIAL, HuggingFaceBPE, HuggingFaceBPEConfig
from tests.tiny_hf_models import TOKENIZERS

TEXT = "the value of an expression is extraordinarily circumlocutory"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_fairseq_finds_it_by_name_and_gets_symbols_and_text(kind: str, hf_tokenizers: dict[str, Path]) -> None:
    bpe = build_bpe(Namespace(bpe="hf_tokenizer", hf_tokenizer=str(hf_tokenizers[kind])))
    assert type(bpe) is HuggingFaceBPE
    symbols = bpe.encode(TEXT)
    assert symbols.split(" ") == HuggingFaceTokenizer(hf_tokenizers[kind]).symbols_of(TEXT)
    assert bpe.decode(symbols) == TEXT
    assert bpe.decode(f"<s> {symbols} <mask> </s>") == f"{TEXT} <mask>"
    assert (bpe.encode(""), bpe.decode("")) == ("", "")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_words_begin_where_the_text_has_a_blank_before_them(kind: str, hf_tokenizers: dict[str, Path]) -> None:
    bpe = HuggingFaceBPE(HuggingFaceBPEConfig(hf_tokenizer=str(hf_tokenizers[kind])))
    symbols = bpe.encode(TEXT).split()
    assert len(symbols) > len(TEXT.split())  # some words have several pieces
    begins = [bpe.is_beginning_of_word(symbol) for symbol in symbols]
    begins[0] = True  # byte-level BPE does not mark the first word of a text
    starts = [index for index, begin in enumerate(begins) if begin]
    words = [bpe.decode(" ".join(symbols[a:b])) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert [word.replace(" ", "").removeprefix("##") for word in words] == TEXT.split()
    assert all(bpe.is_beginning_of_word(symbol) for symbol in SPECIAL)
    assert not bpe.is_beginning_of_word("no symbol of the vocabulary")


@pytest.mark.parametrize("before", ["The value ", "the value", "(", "a  ", "One, "])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_continued_text_is_read_as_the_symbol(kind: str, before: str, hf_tokenizers: dict[str, Path]) -> None:
    bpe = HuggingFaceBPE(HuggingFaceBPEConfig(hf_tokenizer=str(hf_tokenizers[kind])))
    start, numbers = bpe.encode(before).split(), {True: 0, False: 0}
    for symbol in bpe.tokenizer.symbols:
        text, token = bpe.tokenizer.continued(before, symbol)
        assert bpe.tokenizer.continued("", symbol) == (token, token)
        assert text.startswith(before.rstrip())
        assert text.endswith(token)
        plain = re.sub("^(##|Ġ|▁)", "", symbol)
        possible = {before.rstrip() + space + plain for space in (before[len(before.rstrip()) :], "", " ")}
        if any(bpe.encode(one).split() == [*start, symbol] for one in possible):
            numbers[bpe.encode(text).split() == [*start, symbol]] += 1
    assert numbers[True] > 100
    assert numbers[False] == 0
