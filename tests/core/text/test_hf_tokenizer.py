"""A Hugging Face tokenizer whose vocabulary is fairseq's dictionary, against the library."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from mlsm_plugin.core.text.hf_tokenizer import (
    HuggingFaceTokenizer,
    own_special_symbols,
    own_special_tokens,
    special_ids,
)
from tests.tiny_hf_models import OWN_TOKENS, TOKENIZERS, add_nothing_around, add_own_tokens, library_ids

ODD = ["a <mask> [MASK] </s> [SEP] b", "Ünïcödé ﬁ 雪 \u2028 x", "  two  spaces ", "<s>", "don't", "“—”"]


@cache
def both(folder: Path) -> tuple[HuggingFaceTokenizer, Any]:
    """Ours and the library's."""
    return HuggingFaceTokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_are_mapped_one_to_one(kind: str, hf_tokenizers: dict[str, Path]) -> None:
    tokenizer, theirs = both(hf_tokenizers[kind])
    assert len(set(tokenizer.hf_ids.tolist())) == len(tokenizer.hf_ids) == len(theirs)
    special = (theirs.cls_token_id, theirs.pad_token_id, theirs.sep_token_id, theirs.unk_token_id)
    assert tuple(tokenizer.hf_ids[:4]) == special
    assert tokenizer.hf_ids[-1] == theirs.mask_token_id
    names = theirs.convert_ids_to_tokens(tokenizer.hf_ids[4:-1].tolist())
    for number, symbol, name in zip(tokenizer.hf_ids[4:-1].tolist(), tokenizer.symbols, names, strict=True):
        assert symbol == (f"[hf:{number}]" if re.search(r"\s", name) else name)
    if kind == "byte_level":  # RoBERTa's order is fairseq's
        assert np.array_equal(np.sort(tokenizer.hf_ids), np.arange(len(theirs)))


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.sampled_from(ODD), st.text(max_size=60)))
def test_symbols_of_any_text_are_the_librarys_tokens(kind: str, hf_tokenizers: dict[str, Path], text: str) -> None:
    tokenizer, theirs = both(hf_tokenizers[kind])
    symbols = tokenizer.symbols_of(text)
    ids = [int(tokenizer.hf_ids[["<s>", "<pad>", "</s>", "<unk>", *tokenizer.symbols].index(s)]) for s in symbols]
    expected = library_ids(theirs, text)
    special = {int(tokenizer.hf_ids[index]) for index in (0, 1, 2, -1)}
    assert special.isdisjoint(expected) or kind.endswith("unigram")  # where they are pieces like others
    assert ids == [tokenizer.unknown_id if number in special else number for number in expected]
    assert not {"<s>", "</s>", "<pad>", "<mask>"} & set(symbols)
    if kind == "byte_level":
        assert tokenizer.text_of(symbols).strip() == text.strip()


def changed_copy(folder: Path, copy: Path, file: str, **values: object) -> Path:
    shutil.copytree(folder, copy)
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps({**content, **values}))
    return copy


def test_tokens_that_fairseq_cannot_name_keep_their_ids(hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    model = json.loads((hf_tokenizers["word_piece"] / "tokenizer.json").read_text())["model"]
    vocabulary = model["vocab"]
    odd = {"<weird>": "the", "<mask>": "and", "a b": "of", "[hf:7]": "is"}
    for new, old in odd.items():
        vocabulary[new] = vocabulary.pop(old)
    folder = changed_copy(hf_tokenizers["word_piece"], tmp_path / "odd", "tokenizer.json", model=model)
    tokenizer = HuggingFaceTokenizer(folder)
    for token in odd:
        assert f"[hf:{vocabulary[token]}]" in tokenizer.symbols
        assert token not in tokenizer.symbols
    assert len(set(tokenizer.symbols)) == len(tokenizer.symbols) == len(vocabulary) - 5


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_of_symbols_leaves_out_what_is_not_text(kind: str, hf_tokenizers: dict[str, Path]) -> None:
    tokenizer, _ = both(hf_tokenizers[kind])
    value, name = tokenizer.symbols_of("the value"), tokenizer.symbols_of("a name")
    assert tokenizer.text_of([]) == tokenizer.text_of(["<s>", "</s>", "<pad>"]) == ""
    assert tokenizer.text_of(["<s>", *value, "</s>", "<pad>"]) == "the value"
    assert tokenizer.text_of([*value, "<mask>", *name, "<unk>"]) == "the value <mask> a name <unk>"
    with pytest.raises(KeyError):
        tokenizer.text_of(["no symbol of the vocabulary"])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_saved_tokenizer_is_the_same(kind: str, hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    tokenizer, _ = both(hf_tokenizers[kind])
    tokenizer.save(tmp_path)
    again = HuggingFaceTokenizer(f"hf:{tmp_path}")
    assert again.symbols == tokenizer.symbols
    np.testing.assert_array_equal(again.hf_ids, tokenizer.hf_ids)
    assert again.backend.to_str() == tokenizer.backend.to_str()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_of_both_sides_belong_together(kind: str, hf_tokenizers: dict[str, Path]) -> None:
    tokenizer, theirs = both(hf_tokenizers[kind])
    assert tokenizer.largest_id == max(theirs.get_vocab().values())
    assert len(tokenizer.fairseq_ids) == tokenizer.largest_id + 1
    ordinary = np.arange(4, len(tokenizer.hf_ids) - 1)
    np.testing.assert_array_equal(tokenizer.fairseq_ids[tokenizer.hf_ids[ordinary]], ordinary)
    assert (tokenizer.fairseq_ids[tokenizer.hf_ids[[0, 1, 2, 3, -1]]] == 3).all()  # <unk>


def test_tokenizers_that_do_not_work_are_named(hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no readable tokenizer: "):
        HuggingFaceTokenizer(tmp_path / "empty")
    damaged = shutil.copytree(hf_tokenizers["word_piece"], tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="damaged has no readable tokenizer: ") as error:
        HuggingFaceTokenizer(damaged)
    assert "\n" not in str(error.value)
    for name, changes in {"endless": {"sep_token": None}, "alike": {"cls_token": "[SEP]"}}.items():
        folder = changed_copy(hf_tokenizers["word_piece"], tmp_path / name, "tokenizer_config.json", **changes)
        with pytest.raises(
            ValueError, match=f"the tokenizer of {folder} must have three different tokens that begin, end"
        ):
            HuggingFaceTokenizer(folder)


WITH_OWN_TOKENS = "the [E1] name [/E1] of x[E1]y <ctrl>"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_of_the_own_list_are_read_as_by_the_library(
    kind: str, hf_tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    add_own_tokens(hf_tokenizers[kind], tmp_path / "own")
    tokenizer, theirs = both(tmp_path / "own")
    ((ids, offsets),) = tokenizer.encoded([WITH_OWN_TOKENS])
    assert ids == theirs(WITH_OWN_TOKENS, add_special_tokens=False)["input_ids"]
    own = theirs.convert_tokens_to_ids(list(OWN_TOKENS))
    assert [ids.count(number) for number in own] == [2, 1, 1]
    places = [offsets[place] for place, number in enumerate(ids) if number in own]
    assert [WITH_OWN_TOKENS[start:stop] for start, stop in places] == ["[E1]", "[/E1]", "[E1]", "<ctrl>"]
    names = tokenizer.symbols_of(WITH_OWN_TOKENS)
    assert [name for name in names if name in own_special_symbols(tmp_path / "own")] == [
        *("[E1]", "[/E1]", "[E1]", f"[hf:{own[2]}]")
    ]
    assert {*own} < tokenizer.special_ids == special_ids(theirs)
    assert own_special_tokens(theirs) == dict(zip(own, OWN_TOKENS, strict=True))
    saved = HuggingFaceTokenizer(tmp_path / "own")
    saved.save(tmp_path / "again")
    assert HuggingFaceTokenizer(tmp_path / "again").encoded([WITH_OWN_TOKENS]) == [(ids, offsets)]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_can_split_its_special_tokens(kind: str, hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    add_own_tokens(hf_tokenizers[kind], tmp_path / "own", split_special_tokens=True)
    tokenizer, theirs = both(tmp_path / "own")
    ((ids, _),) = tokenizer.encoded([WITH_OWN_TOKENS])
    assert theirs.split_special_tokens
    assert ids == theirs(WITH_OWN_TOKENS, add_special_tokens=False)["input_ids"]
    assert tokenizer.special_ids.isdisjoint(ids)
    assert len(tokenizer.special_ids) == len(HuggingFaceTokenizer(hf_tokenizers[kind]).special_ids) + len(OWN_TOKENS)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_text_masks_or_ends_itself(kind: str, hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(hf_tokenizers[kind])
    theirs.add_tokens([AddedToken(gap, special=True) for gap in ("<mask_s>", "<extra_id_0>")], special_tokens=True)
    theirs.save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert {*theirs.convert_tokens_to_ids(["<mask_s>", "<extra_id_0>"])} < tokenizer.special_ids
    ((ids, _),) = tokenizer.encoded(
        [" ".join([*theirs.all_special_tokens, "<mask_s> <extra_id_0> <mask> [MASK] </s>"])]
    )
    assert tokenizer.special_ids.isdisjoint(ids)
    text = f"a </s> <pad> b {theirs.mask_token} c"
    ids, _ = tokenizer.encoded_with_masks(text, theirs.mask_token)
    assert [number for number in ids if number in tokenizer.special_ids] == [theirs.mask_token_id]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_a_tokenizer_adds_to_a_text(kind: str, hf_tokenizers: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(hf_tokenizers[kind])
    assert (tokenizer.before, tokenizer.after) == ([tokenizer.begin_id], [tokenizer.end_id])
    shutil.copytree(hf_tokenizers[kind], tmp_path / "bare")
    add_nothing_around(tmp_path / "bare")
    bare = HuggingFaceTokenizer(tmp_path / "bare")
    assert (bare.before, bare.after) == ([], [])
    assert (bare.begin_id, bare.end_id) == (tokenizer.begin_id, tokenizer.end_id)
    assert bare.surrounded([7]) == [7]


def test_a_text_has_the_same_tokens_each_time(
    hf_tokenizers: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(hf_tokenizers["byte_level"], tmp_path / "dropout")
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    text = "the name is bound to the value of an expression"
    tokenizer = HuggingFaceTokenizer(folder)
    expected = HuggingFaceTokenizer(hf_tokenizers["byte_level"]).ids_of(text)
    assert [tokenizer.ids_of(text) for _ in range(5)] == [expected] * 5
    assert tokenizer.ids_with_masks(f"{text}<mask>", "<mask>") == [*expected, tokenizer.mask_id]
    assert caplog.text.count("the tokenizer drops merges at random") == 1
