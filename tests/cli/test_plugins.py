"""``--user-dir``: a folder of the user's own is imported before the command is parsed, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.cli.main import main
from mlsm_plugin.cli.plugins import import_plugin, user_dir_of
from mlsm_plugin.core.sparse_coding import coder
from tests.conftest import failing_mlsm

Capture = pytest.CaptureFixture[str]
PLUGIN = """
from dataclasses import dataclass, field

from mlsm_plugin.core.sparse_coding.coder import SparseCoder, register_coder


@dataclass(frozen=True)
class Options:
    wobble: int = field(default=4, metadata={"help": "how much it wobbles"})


@register_coder
class WobblingCoder(SparseCoder):
    kind = "wobbling"
    options_type = Options
"""


def package(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "__init__.py").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["encode", "data", "--user-dir", "mine", "--layer", "2"], "mine"),
        (["--user-dir=mine", "encode"], "mine"),
        (["encode", "--user-dir", "a", "--user-dir", "b"], "b"),
        (["encode", "--user", "mine"], None),  # abbreviations are not understood
        (["encode", "data"], None),
        (["encode", "--user-dir"], None),
    ],
)
def test_folder_is_found_among_other_arguments(words: list[str], expected: str | None) -> None:
    assert user_dir_of(words) == expected


def test_flag_without_a_value_is_a_mistake_of_usage(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--user-dir"])
    assert end.value.code == 2
    assert "--user-dir: expected one argument" in capsys.readouterr().err


def test_what_is_registered_there_has_flags(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder, "_KINDS", dict(coder._KINDS))
    folder = package(tmp_path / "wobbling_plugin", PLUGIN)
    with pytest.raises(SystemExit) as end:
        main(["encode", "--user-dir", str(folder), "--help"])
    assert end.value.code == 0
    assert "how much it wobbles (default: 4)" in " ".join(capsys.readouterr().out.split())
    assert "wobbling" in coder.coder_kinds()
    import_plugin(str(folder))  # once more, as by a second command of this process
    with pytest.raises(SystemExit):
        main(["encode", "--help"])
    assert "how much it wobbles" in capsys.readouterr().out  # it stays registered


def test_folders_that_are_not_plugins_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "bare_folder").mkdir()
    broken = package(tmp_path / "broken_plugin", "import no_such_module_of_mine\n")
    failing = package(tmp_path / "failing_plugin", "raise RuntimeError('two\\nlines')\n")
    twice = package(tmp_path / "greedy_plugin", PLUGIN.replace('"wobbling"', '"lasso"'))
    for folder, message in (
        (tmp_path / "absent_folder", "does not exist"),
        (tmp_path / "bare_folder", "is not a Python package: it has no __init__.py"),
        (broken, "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_of_mine'"),
        (failing, "cannot be imported: RuntimeError: two lines"),
        (twice, "cannot be imported: ValueError: the kind of coder 'lasso' "),
    ):
        line = failing_mlsm(capsys, "encode", "data", "--user-dir", folder, "--auxiliary", "a", "--dictionary", "d")
        assert line.startswith(f"mlsm: error: --user-dir {folder} {message}")
