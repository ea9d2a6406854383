from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.files.atomic_files import parse_json


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_values_survive(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a":' * 100_000, b"\xff\xfe", "1" * 10_000])
def test_what_is_not_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)
