from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.core.files.atomic_files import parse_json, read_json
from mlsm_plugin.core.text.text_files import json_objects


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_values_survive(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a":' * 100_000, b"\xff\xfe", "1" * 10_000])
def test_what_is_not_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_keys_that_stand_twice_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": 1, "b": [{"c": 1}, {"c": 2}], "a": 2}', encoding="utf-8")
    assert read_json(path) == {"a": 2, "b": [{"c": 1}, {"c": 2}]}
    assert caplog.messages == [f"{path}: an object has the key 'a' several times; its last value counts"]
    caplog.clear()
    path.write_text('{"a": 1}\n{"a": 1, "a": 2}\n{"b": 1, "b": 1}\n', encoding="utf-8")
    assert [item for _, item in json_objects(path)] == [{"a": 1}, {"a": 2}, {"b": 1}]
    assert caplog.messages == [f"{path}, line 2 has the key 'a' several times; its last value counts"]
