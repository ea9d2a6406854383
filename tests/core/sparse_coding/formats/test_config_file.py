"""Settings of other programs: each key is understood, or known not to matter, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.files.json_checks import whole
from mlsm_plugin.core.sparse_coding.formats.foreign_files import ConfigFile, one_of, yes_or_no


def test_keys_are_taken_once() -> None:
    file = ConfigFile("cfg.json", {"k": 3, "lr": 1, "below": {"a": True}, "name": "x", "long": "y" * 2000, "no": None})
    assert file.take("k", whole(1)) == 3
    assert file.take("k", default=None) is None
    assert file.take("absent", default=7) == 7
    below = file.part("below")
    assert below.take("a", yes_or_no) is True
    below.finish()
    file.part("absent").finish()
    assert file.facts(("name", "long", "no", "absent")) == {"name": "x"}
    file.finish(known=("lr",))
    with pytest.raises(ValueError, match=r"cfg\.json has settings that this program does not know \('lr'\)"):
        file.finish()


def test_older_names() -> None:
    file = ConfigFile("cfg.json", {"old": 1, "same": 2, "new": 2, "one": 1, "other": 2})
    file.rename("old", "older")
    file.rename("same", "new")
    file.rename("absent", "new")
    assert (file.take("older"), file.take("new")) == (1, 2)
    with pytest.raises(ValueError, match="'one' and 'other', which contradict each other"):
        file.rename("one", "other")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "not a dictionary of settings"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (None, "does not exist"),
    ],
)
def test_files_that_are_no_settings(content: bytes | None, problem: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "cfg.json").write_bytes(content)
    with pytest.raises(ValueError, match=problem) as caught:
        ConfigFile.read(tmp_path / "cfg.json")
    assert str(tmp_path) in str(caught.value)


def test_values_are_checked() -> None:
    file = ConfigFile("cfg.json", {"a": 1, "b": True, "c": [1], "d": float("nan")})
    with pytest.raises(ValueError, match=r"cfg\.json: a: 1 is neither true nor false"):
        file.take("a", yes_or_no)
    with pytest.raises(ValueError, match=r"cfg\.json: b: true is not one of 1, 2"):
        file.take("b", one_of(1, 2))
    with pytest.raises(ValueError, match=r"cfg\.json: c: it is not a dictionary"):
        file.part("c")
    with pytest.raises(ValueError, match=r"cfg\.json lacks 'e'"):
        file.take("e")
    assert file.facts(("d",)) == {}
