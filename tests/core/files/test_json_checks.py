from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.files.json_checks import check_json, fields, list_of, number, optional, text, values, whole

CHECK = fields(
    {"n": whole(1, 10), "parts": list_of(fields({"size": whole()}))},
    {"weight": optional(number), "names": values(text)},
)
GOOD = {"n": 3, "parts": [{"size": 0}, {"size": 2, "more": []}], "weight": None, "names": {"a": "b"}, "other": [1]}


def test_good_values_are_returned():
    assert check_json(GOOD, CHECK, "file") is GOOD
    assert check_json({"n": 10, "parts": []}, CHECK, "file")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ([1], r"\[1\] is not a dictionary"),
        (None, "None is not a dictionary"),
        ({"n": 0}, "n: 0 is not a whole number from 1 to 10"),
        ({"n": 11}, "n: 11 is not"),
        ({"n": True}, "n: True is not"),
        ({"n": "3"}, "n: '3' is not"),
        ({"n": 3.0}, r"n: 3\.0 is not"),
        ({"parts": {}}, "parts: {} is not a list"),
        ({"parts": [{"size": 1}, {}]}, r"parts: \[1\]: size is missing"),
        ({"parts": [{"size": -1}]}, r"parts: \[0\]: size: -1 is not"),
        ({"weight": float("inf")}, "weight: inf is not a finite number"),
        ({"weight": "x" * 100}, "weight: 'x+\\.\\.\\. is not a finite number"),
        ({"names": []}, r"names: \[\] is not a dictionary"),
        ({"names": {"a": 1}}, "names: a: 1 is not text"),
    ],
)
def test_the_first_problem_is_named(change, problem):
    value = {**GOOD, **change} if isinstance(change, dict) else change
    with pytest.raises(
        ValueError, match=f"^file is not valid: {problem}.*; if a step of mlsm wrote it, delete it and run that step"
    ):
        check_json(value, CHECK, "file")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "size"]), inner, max_size=4),
)


@given(JSON)
def test_any_value_is_taken_or_a_value_error(value):
    try:
        check_json(value, CHECK, "file")
    except ValueError:
        return
    assert 1 <= value["n"] <= 10
    assert all(part["size"] >= 0 for part in value["parts"])
