"""``mlsm doctor``: the table of this installation, and what only an import can tell."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from mlsm_plugin.cli.main import main

Capture = pytest.CaptureFixture[str]


def rows(output: str) -> dict[str, tuple[str, str]]:
    """Mark and version of each component."""
    lines = output.splitlines()[:-1]
    return {line[6:22].strip(): (line[:4].strip(), line[22:41].strip()) for line in lines}


@pytest.mark.slow
def test_installation_of_these_tests_is_fine(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    found = rows(output)
    assert found["torch"] == ("ok", metadata.version("torch"))
    assert found["fairseq C code"] == ("ok", "compiled")
    assert found["device"][0] == "ok"
    assert not {mark for mark, _ in found.values()} - {"ok", "--"}
    assert output.splitlines()[-1] == "everything is fine"


@pytest.mark.slow
def test_what_cannot_be_imported_is_bad_with_its_fix(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    import fairseq.data

    monkeypatch.delattr(fairseq.data, "data_utils_fast", raising=False)
    monkeypatch.setitem(sys.modules, "fairseq.data.data_utils_fast", None)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert rows(output)["fairseq C code"] == ("BAD", "missing")
    (line,) = [line for line in output.splitlines() if "fairseq C code" in line]
    assert line.endswith("--force-reinstall --no-deps fairseq-fixed")
    assert output.splitlines()[-1] == "1 to fix"
