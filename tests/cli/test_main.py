"""The ``mlsm`` command itself: its help is there at once, and its subcommands find what the package registers."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mlsm_plugin.cli import command_line
from mlsm_plugin.cli.actions import actions_of
from mlsm_plugin.cli.main import COMMANDS, EXAMPLES, build_parser, main
from mlsm_plugin.version import __version__

MLSM = Path(sys.executable).with_name("mlsm")
SLOW_TO_IMPORT = ("torch", "fairseq", "scipy", "transformers")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command; its standard error lists what it has imported."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    return subprocess.run([MLSM, *words], capture_output=True, text=True, env=environment, check=False)


def imported(found: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line for line in found.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("--help",), 0, "evaluate"),
        (("--version",), 0, __version__),
        ((), 2, "required: COMMAND"),
        (("finetune", "--help"), 0, "--valid"),
        (("npm", "fill", "--texts"), 2, "required: TEXT, --checkpoint"),
    ],
    ids=["help", "version", "nothing", "help of a command", "wrong options"],
)
def test_what_runs_nothing_imports_nothing_slow(words: tuple[str, ...], status: int, text: str) -> None:
    found = run(*words)
    assert found.returncode == status
    assert text in found.stdout + found.stderr
    assert imported(found).isdisjoint(SLOW_TO_IMPORT)


def test_actions_have_their_own_help_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="mlsm")
    add = actions_of(parser)
    add("first", "do it", lambda args, extra: 3).add_argument("--times", type=int, default=2, help="how often")
    args = parser.parse_args(["first"])
    assert (args.run(args, []), args.times, args.action) == (3, 2, "first")
    with pytest.raises(SystemExit):
        parser.parse_args(["first", "--help"])
    assert "how often (default: 2)" in capsys.readouterr().out


def test_a_mistyped_command_names_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adpat", "model"]) == 2
    assert "there is no command 'adpat', did you mean `mlsm adapt`?" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert "there is no command 'xyz'; `mlsm --help` lists all" in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_that_runs_has_what_the_package_registers() -> None:
    found = run("evaluate", "pairs", "--checkpoint", "nowhere", "--input", "nowhere.jsonl")
    assert found.returncode == 1
    assert {"fairseq", "mlsm_plugin.fairseq_plugin.tasks", "mlsm_plugin.fairseq_plugin.criterions"} <= imported(found)
    assert "torch._dynamo" not in imported(found)  # it takes a second, and nothing is compiled


def test_a_command_that_needs_no_fairseq_does_not_import_it() -> None:
    found = run("convert", "nowhere", "out")
    assert found.returncode == 1
    assert "nowhere" in found.stderr.splitlines()[-1]
    assert "fairseq" not in imported(found)


@pytest.mark.parametrize(
    ("words", "started_as", "expected"),
    [
        (["/bin/mlsm", "plot"], ["python", "/bin/mlsm", "plot"], True),
        (["mlsm.exe", "plot"], ["python", "mlsm.exe", "plot"], True),
        (["-m", "plot"], ["python", "-X", "dev", "-m", "mlsm_plugin.cli.main", "plot"], True),
        (["-m", "run"], ["python", "-m", "fairseq_cli.train", "run"], False),
        (["train.py"], ["python", "train.py"], False),
        (["/bin/mlsm", "plot"], ["python", "-c", "from multiprocessing.spawn import spawn_main", "--fork"], False),
        ([""], ["python"], False),
        ([], ["python"], False),
    ],
)
def test_only_the_command_itself_registers_later(
    words: list[str], started_as: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "orig_argv", started_as)
    assert command_line.is_mlsm() is expected


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_in_an_example_that_is_valid(command: str) -> None:
    program, *words = shlex.split(EXAMPLES[command])
    assert (program, words[0]) == ("mlsm", command)
    parser = build_parser(command)
    assert parser.parse_args(words).command == command
    actions = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert actions.choices[command].epilog.endswith(f"Example: {EXAMPLES[command]}")
