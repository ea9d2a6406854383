"""A wrong place to write to is told before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.cli.coding_options import output_folder
from tests.conftest import failing_mlsm

# options of each command up to the folder that it writes to
COMMANDS = {
    "adapt": ("model", "--text", "text", "--output"),
    "auxiliary": ("data-bin", "--max-update", "1", "--save-dir"),
    "binarize": ("--tokenizer", "tokenizer", "--train", "text", "--output"),
    "convert": ("model.pt",),
    "dictionary": ("data-bin", "--auxiliary", "model.pt", "--output"),
    "encode": ("data-bin", "--auxiliary", "model.pt", "--dictionary", "dictionary", "--output"),
    "finetune": ("--checkpoint", "model.pt", "--train", "text", "--output"),
    "npm": ("datastore", "data-bin", "--checkpoint", "model.pt", "--output"),
    "preprocess": ("--train", "text", "--output"),
    "pretrain": ("data-bin", "--max-update", "1", "--save-dir"),
    "search": ("index", "text", "--model", "model", "--output"),
    "tokenizer": ("--input", "text", "--output"),
}


def test_folders_may_be_new_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for name in (tmp_path, tmp_path / "new", tmp_path / "new" / "below"):
        assert output_folder(str(name)) == str(name)
    for name in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "file" / "below" / "it"):
        with pytest.raises(NotADirectoryError, match="file exists and is not a folder; choose another name"):
            output_folder(str(name))
    with pytest.raises(FileNotFoundError, match="the name of the folder to write to is empty"):
        output_folder("")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_file_where_a_folder_is_written_is_told_at_once(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    for name in (tmp_path / "file", tmp_path / "file" / "below"):
        line = failing_mlsm(capsys, command, *COMMANDS[command], name)
        assert f"{tmp_path / 'file'} exists and is not a folder; choose another name" in line
    assert (tmp_path / "file").read_text() == "kept"
