"""The notebook of the tutorial is its page, and runs."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.docs.pages import read
from tests.script_module import load_script

notebook_script = load_script("scripts/make_notebook.py")
PAGE = read("docs/tutorial.md")
MOST_BYTES = 40_000


def written() -> nbformat.NotebookNode:
    return nbformat.reads(read("docs/tutorial.ipynb"), as_version=4)


def test_the_notebook_is_the_page_as_it_is_now() -> None:
    cells = [(cell.cell_type, cell.source) for cell in written().cells]
    expected = [(cell.cell_type, cell.source) for cell in notebook_script.cells_of(PAGE)]
    assert cells == expected, "write it again: python scripts/make_notebook.py"


def test_the_notebook_shows_what_was_printed_and_nothing_of_the_machine() -> None:
    text = read("docs/tutorial.ipynb")
    assert len(text) <= MOST_BYTES
    assert not re.search(r"/(home|tmp|root|work|usr)/", text)
    printed = "".join(output.get("text", "") for cell in written().cells for output in cell.get("outputs", []))
    assert "ids are the same on" in printed
    assert re.search(r"0\.\d\d Return the .+ of the array\.", printed)


def test_commands_are_cells_and_samples_of_output_are_not() -> None:
    cells = notebook_script.cells_of(
        "# Title\n\nText.\n\n```bash\na\nb\n```\n```text\nout\n```\n\n```python\nx = 1\n```\nEnd.\n"
    )
    assert [cell.source for cell in cells[2:]] == ["# Title\n\nText.", "%%bash -e\na\nb", "x = 1", "End."]


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError):
        notebook_script.run(notebook_script.cells_of("```bash\nfalse\ntrue\n```\n"), tmp_path)


def test_long_outputs_are_cut_and_folders_and_logs_left_out(tmp_path: Path) -> None:
    lines = "\n".join(f"echo {tmp_path}/line {number}" for number in range(30))
    page = f"```bash\necho '2026-01-01 10:00:00 | INFO'\n{lines}\n```\n"
    notebook = notebook_script.run(notebook_script.cells_of(page), tmp_path)
    assert len(notebook_script.printed(notebook.cells[-1]).splitlines()) == 31
    notebook_script.tidy(notebook, [tmp_path])
    expected = ["...", *(f"line {number}" for number in range(10, 30))]
    assert notebook_script.printed(notebook.cells[-1]).splitlines() == expected
