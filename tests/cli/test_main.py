"""The ``mlsm`` command itself: its help is there at once, and its subcommands find what the package registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    [(("--help",), 0, "evaluate-pairs"), (("--version",), 0, __version__), ((), 2, "required: COMMAND")],
    ids=["help", "version", "nothing"],
)
def test_what_runs_nothing_imports_nothing_slow(words: tuple[str, ...], status: int, text: str) -> None:
    found = run(*words)
    assert found.returncode == status
    assert text in found.stdout + found.stderr
    assert imported(found).isdisjoint(SLOW_TO_IMPORT)


def test_a_subcommand_has_what_the_package_registers() -> None:
    found = run("finetune", "--help")
    assert found.returncode == 0
    assert {"fairseq", "mlsm_plugin.tasks", "mlsm_plugin.criterions"} <= imported(found)
