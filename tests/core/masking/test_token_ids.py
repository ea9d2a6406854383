"""What counts as ids, and which of them must differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.core.masking.span_corruption import SpanCorruptionCollator, corrupt_spans
from mlsm_plugin.core.masking.token_ids import check_attention, check_distinct, checked_ids, checked_sentinels

NO_IDS = r"a text does not consist of token ids \(whole numbers from 0 on\)"


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2], np.uint8), torch.tensor([1, 2])])
def test_whole_numbers_are_ids(ids: Any) -> None:
    found = checked_ids(ids, "a text")
    assert (found.tolist(), found.dtype) == ([1, 2], np.int64)
    assert checked_ids([], "a text").tolist() == []


@pytest.mark.parametrize(
    "ids", [[1.0, 2.0], [5.7, 6.2], ["12", "13"], "12", [[1]], [-1], [2**31], [True, False], [None], 3]
)
def test_everything_else_is_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match=NO_IDS):
        checked_ids(ids, "a text")


@pytest.mark.parametrize("ids", [[11.7, 12.0, 13.0], ["11", "12", "13"], {"input_ids": [11.5, 12.5, 13.5]}])
def test_fractions_and_strings_are_not_corrupted(ids: Any) -> None:
    with pytest.raises(ValueError, match=NO_IDS):
        SpanCorruptionCollator(range(900, 950), eos=2, pad=1)([ids])
    with pytest.raises(ValueError, match="the text does not consist of token ids"):
        corrupt_spans([11.7, 12.0], sentinels=[90], eos=2, rng=np.random.default_rng(0))


def test_an_attention_mask_leaves_out_padding_only() -> None:
    ids = np.array([5, 6, 7, 1, 1])
    for fits in ([1, 1, 1, 0, 0], [True] * 3 + [False] * 2, torch.ones(5), [1] * 5):
        check_attention(ids, fits, "a text")
    for wrong in ([1, 0, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 0]):
        with pytest.raises(ValueError, match="the attention_mask of a text is 0 at ids that are not padding"):
            check_attention(ids, wrong, "a text")
    for wrong in ([1] * 4, [1, 1, 1, 0, 2], [[1] * 5]):
        with pytest.raises(ValueError, match="does not have a 0 or 1 for each of its 5 ids"):
            check_attention(ids, wrong, "a text")
    with pytest.raises(ValueError, match="is 0 at ids that are not padding"):
        SpanCorruptionCollator(range(900, 950), eos=2, pad=1)(
            [{"input_ids": [11, 12, 13, 14], "attention_mask": [1, 0, 1, 1]}]
        )


def test_two_roles_with_one_id_are_refused() -> None:
    check_distinct({"padding": 0, "</s>": 1, "the unknown token": None, "the mask": None}, remedy="")
    with pytest.raises(ValueError, match=r"^padding and </s> are both the id 1; take others$"):
        check_distinct({"padding": 1, "the mask": 2, "</s>": 1}, remedy="take others")


@pytest.mark.parametrize(
    ("sentinels", "named"),
    [
        ([3] * 100, "sentinel 0 is an unknown or special token, 3"),
        ([90, 91, 90], "sentinel 0 and sentinel 2 are both the id 90"),
        ([90, 2], "</s> and sentinel 1 are both the id 2"),
        ([1, 90], "padding and sentinel 0 are both the id 1"),
    ],
)
def test_sentinels_are_distinct_known_and_not_special(sentinels: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}; if the tokenizer lacks sentinels, add <extra_id_0>"):
        SpanCorruptionCollator(sentinels, eos=2, pad=1, unk=3)
    if 1 not in sentinels:
        with pytest.raises(ValueError, match=named):
            corrupt_spans(range(10, 30), sentinels=sentinels, eos=2, unk=3, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="the list of sentinels does not consist of token ids"):
        checked_sentinels(["<extra_id_0>"], {})  # type: ignore[list-item]


def test_without_the_unknown_id_the_same_id_twice_is_refused_too() -> None:
    with pytest.raises(ValueError, match="sentinel 0 and sentinel 1 are both the id 3"):
        SpanCorruptionCollator([3] * 100, eos=2, pad=1)
    with pytest.raises(ValueError, match="padding and </s> are both the id 2"):
        SpanCorruptionCollator([90], eos=2, pad=2)
    with pytest.raises(ValueError, match="at least 1 sentinels are needed, got 0"):
        SpanCorruptionCollator([], eos=2, pad=1)


def test_too_few_sentinels_are_said(caplog: pytest.LogCaptureFixture) -> None:
    text = list(range(100, 612))  # 512 ids: 77 of noise, in 26 spans of 3
    for sentinels, said in ((range(900, 926), 0), (range(900, 914), 0), (range(900, 903), 1)):
        caplog.clear()
        collator = SpanCorruptionCollator(sentinels, eos=2, pad=1)
        collator([text])
        collator([text])
        assert len(caplog.records) == said
    expected = "only 0.12 of the noise spans of the texts have a sentinel; pass more than 3 sentinels, or shorter texts"
    assert caplog.messages[0].startswith(expected)
    with pytest.raises(ValueError, match=r"only 0\.077 of the noise spans of the texts have a sentinel"):
        SpanCorruptionCollator([900, 901], eos=2, pad=1)([text])
