from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.attacks.commands import COMMANDS, Inputs, Words
from tests.conftest import mlsm
from tests.tiny_models import TinyData

# commands that read a dataset in the folder that they write to
IN_DATASET = ("encode", "inspect")


@pytest.fixture(scope="session")
def inputs(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Read only: copy what a test changes."""
    made = Inputs.within(tmp_path_factory.mktemp("inputs"))
    made.make(tiny)
    return made


@dataclass(frozen=True)
class Place:
    """A folder in which a command runs again and again, always from the same beginning."""

    words: Words
    root: Path
    begin: Path
    log: Path

    def reset(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.begin, self.root)

    def contents(self) -> dict[str, bytes]:
        """The content of each file below the folder; the names of folders end in a slash."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            found[f"{name}/" if path.is_dir() else name] = b"" if path.is_dir() else path.read_bytes()
        return found


@pytest.fixture
def place(inputs: Inputs, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """For the ``command`` of a test."""
    command = request.node.callspec.params["command"]
    begin, root = tmp_path / "begin", tmp_path / "root"
    begin.mkdir()
    if command in IN_DATASET:
        shutil.copytree(inputs.data_bin, begin / "data-bin")
        if command == "inspect":
            mlsm(*COMMANDS["encode"](replace(inputs, data_bin=begin / "data-bin"), begin))
        inputs = replace(inputs, data_bin=root / "data-bin")
    return Place(COMMANDS[command](inputs, root / "output"), root, begin, tmp_path / "log")
