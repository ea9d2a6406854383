"""A folder in the place of a checkpoint, and a mistyped name, in every command that reads a model of fairseq."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.attacks.commands import COMMANDS, Inputs
from tests.conftest import failing_mlsm, mlsm

pytestmark = pytest.mark.slow

MODEL_OF = {
    **dict.fromkeys(("dictionary", "evaluate dictionary", "encode", "preprocess"), "model"),
    **dict.fromkeys(("evaluate pairs", "classify", "finetune", "convert model"), "model"),
    **{"datastore": "npm", "fill": "npm", "infill": "denoising"},
}


def test_a_mistyped_checkpoint_is_told_with_those_that_are_there(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, kind in MODEL_OF.items():
        folder = getattr(inputs, kind).parent
        mistyped = replace(inputs, **{kind: folder / "checkpoint_lats.pt"})
        line = failing_mlsm(capsys, *COMMANDS[command](mistyped, tmp_path / "output"))
        assert line.endswith(f"checkpoint_lats.pt does not exist; {folder} has checkpoint_last.pt"), command
        assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("command", sorted(MODEL_OF))
def test_the_only_checkpoint_of_a_folder_is_taken(command: str, inputs: Inputs, tmp_path: Path) -> None:
    kind = MODEL_OF[command]
    named = replace(inputs, **{kind: getattr(inputs, kind).parent})
    mlsm(*COMMANDS[command](named, tmp_path / "output"))
