"""Sentinels in a text, and what fills a source."""

from __future__ import annotations

import math

import pytest

from mlsm_plugin.core.masking.span_corruption import filled
from mlsm_plugin.core.text.infilled_text import Filler, check_has_gap, sentinels_in


def test_sentinels_come_in_the_order_of_the_text() -> None:
    assert sentinels_in("a<extra_id_2>, <extra_id_0> <extra_id>", 3) == ["<extra_id_2>", "<extra_id_0>"]
    assert sentinels_in("plain", 3) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<extra_id_3>", "<extra_id_3> is not one of the 3 sentinels; use <extra_id_0> to <extra_id_2>"),
        ("<extra_id_01>", "<extra_id_01> is not one of the 3 sentinels"),
        ("<extra_id_1> <extra_id_1>", "<extra_id_1> occurs twice; give each gap its own sentinel"),
    ],
)
def test_other_sentinels_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sentinels_in(text, 3)
    with pytest.raises(ValueError, match="the text has no gap: write <extra_id_0>"):
        check_has_gap([], "plain")


def test_fillers_replace_sentinels_and_have_mean_scores() -> None:
    source, target = [5, 90, 6, 91, 7, 92, 2], [90, 11, 12, 91, 93, 8, 2]
    whole, fillers = filled(source, target, [-1.0, -2.0, -3.0, -0.5, -9.0, -9.0, -9.0], sentinels=range(90, 95), eos=2)
    assert whole == [5, 11, 12, 6, 7]
    assert fillers == [(90, [11, 12], -2.0), (91, [], -0.5), (92, [], -math.inf)]
    assert [Filler(str(token), "", score).is_missing for token, _, score in fillers] == [False, False, True]
