"""Labels that a reader would take for the same one."""

from __future__ import annotations

import logging
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.text.labels import canonical_label, similar_labels, warn_of_similar_labels


@pytest.mark.parametrize(
    "group",
    [
        ("1", "1\u200b"),
        ("1", "１"),
        ("1", "1.0"),
        ("Pos", "pos"),
        ("neg", "neg\ufeff"),
        ("very good", "very\u00a0good"),
    ],
)
def test_labels_that_look_alike_are_grouped(group: tuple[str, str]) -> None:
    assert similar_labels([*group, "other", *group]) == [sorted(group)]


def test_labels_that_differ_are_no_group() -> None:
    assert similar_labels(["0", "1", "-1", "10", "nan", "inf", "pos", "neg", "NN", "NNS", "a b", "ab", "é", "e"]) == []


@given(st.text(alphabet=string.ascii_letters + string.digits + " .-", min_size=1))
def test_the_canonical_form_is_its_own(label: str) -> None:
    assert canonical_label(canonical_label(label)) == canonical_label(label)


def test_the_warning_shows_what_cannot_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_similar_labels(["1", "1\u200b", "2"], "train.tsv")
    assert caplog.messages == [r"train.tsv: the labels '1', '1\u200b' look alike, but count as 2 classes"]
