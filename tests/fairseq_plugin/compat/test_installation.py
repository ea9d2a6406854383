"""Which fairseq is there, and what ``mlsm doctor`` and the other commands say of what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlsm_plugin.cli import main as cli
from mlsm_plugin.cli.main import main
from mlsm_plugin.fairseq_plugin.compat import installation
from tests.conftest import REPOSITORY, failing_mlsm

Capture = pytest.CaptureFixture[str]
CONSTRAINED = "pip install -c constraints.txt"
BOTH = "fairseq 0.12.2 and fairseq-fixed 0.12.3.1 are both installed and overwrite each other"


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let these versions of the two fairseqs be installed, and of others of these names."""
    known = {"fairseq-fixed": None, "fairseq": None, **{name.replace("_", "-"): it for name, it in versions.items()}}
    real = metadata.version

    def version(name: str) -> str | None:
        if name in known and known[name] is None:
            raise metadata.PackageNotFoundError(name)
        return known.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"fairseq_fixed": "0.12.3.1"}, None),
        (
            {"fairseq_fixed": "0.12.3.1", "fairseq": "0.12.2"},
            f"{BOTH}; fix: pip uninstall fairseq fairseq-fixed; {CONSTRAINED} fairseq-fixed",
        ),
        (
            {"fairseq": "0.12.2"},
            "fairseq 0.12.2 does not import on Python 3.11 and newer; "
            f"fix: pip uninstall fairseq; {CONSTRAINED} fairseq-fixed",
        ),
        ({}, f"fairseq is missing; fix: {CONSTRAINED} fairseq-fixed"),
    ],
)  # fmt: skip
def test_a_fairseq_that_cannot_work_is_one_line_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], problem: str | None
) -> None:
    pretend(monkeypatch, **versions)
    assert installation.fairseq_problem() == problem


@pytest.mark.slow
def test_doctor_says_what_a_missing_numba_costs(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["BAD", "numba"]]
    assert f"coding is several times slower; fix: {CONSTRAINED} --force-reinstall numba" in line


def test_doctor_repeats_what_pip_check_says_of_this_package(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    about_others = "other 1.0 requires more, which is not installed."
    about_own = "mlsm-plugin 0.2.0 has requirement torch>=2.6, but you have torch 2.0.1."
    of_fairseq = "fairseq-fixed 0.12.3.1 requires hydra-core, which is not installed."
    said = SimpleNamespace(stdout="\n".join([about_others, about_own, of_fairseq]))
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: said)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[1:]) for line in lines if line.startswith(" BAD ")] == [about_own, of_fairseq]
    assert lines[-1] == "2 to fix"


@pytest.mark.slow
def test_doctor_lists_what_extras_lack_without_a_complaint(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    pretend(monkeypatch, fairseq_fixed="0.12.3.1", matplotlib=None)
    assert main(["doctor"]) == 0
    assert "  --  matplotlib      missing" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", sorted({*cli.COMMANDS} - cli.MAY_DO_WITHOUT_FAIRSEQ))
def test_every_other_command_stops_without_fairseq(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, command: str
) -> None:
    pretend(monkeypatch)

    def must_not_run(command: str) -> None:
        raise AssertionError("the command must not be imported")

    monkeypatch.setattr(cli, "build_parser", must_not_run)
    line = failing_mlsm(capsys, command, "anything")
    assert line.startswith("mlsm: error: fairseq is missing; fix: pip install -c constraints.txt fairseq")


def test_commands_that_may_do_without_stop_where_they_need_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    (tmp_path / "dict.txt").touch()
    (tmp_path / "model.pt").touch()
    for words in (
        ("binarize", "--tokenizer", "t", "--train", "a", "--output", tmp_path / "out"),
        ("encode", tmp_path, "--auxiliary", "a", "--dictionary", "d"),
        ("convert", tmp_path / "model.pt", tmp_path / "out", "--text", "a"),
    ):
        assert failing_mlsm(capsys, *words).startswith("mlsm: error: fairseq is missing; fix: pip install")


def test_a_package_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "mlsm_plugin.cli.encode", None)
    assert "mlsm_plugin.cli.encode" in (line := failing_mlsm(capsys, "encode", "x"))
    assert line.endswith("; `mlsm doctor` lists what is missing")


def test_help_and_version_work_without_fairseq(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    pretend(monkeypatch)
    for flag in ("--help", "--version"):
        with pytest.raises(SystemExit) as end:
            main([flag])
        assert end.value.code == 0
    assert "mlsm_plugin" in capsys.readouterr().out


@pytest.mark.slow
def test_importing_the_plugin_into_fairseq_says_that_there_are_two() -> None:
    code = (
        "from importlib import metadata\nreal = metadata.version\n"
        "metadata.version = lambda name: '0.12.2' if name.startswith('fairseq') else real(name)\n"
        "import fairseq\nimport mlsm_plugin\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: mlsm_plugin cannot run here: fairseq 0.12.2 and fairseq-fixed 0.12.2 are both")


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "logging.root.setLevel(logging.DEBUG); "])
def test_importing_the_package_does_not_let_others_log_their_details(more: str) -> None:
    code = f"import logging; {more}import mlsm_plugin; print(logging.getLevelName(logging.root.level))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["DEBUG" if more else "INFO"]
