"""Write a page of the documentation as a notebook: its text, its commands, and what they print here.

    python scripts/make_notebook.py

runs the tutorial in a new folder, ten minutes on two cores, and writes docs/tutorial.ipynb. It needs the packages
nbclient and ipykernel. Progress and logs are left out, and long outputs are cut.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

REPOSITORY = Path(__file__).resolve().parents[1]
NEEDED = ("mlsm_plugin", "scripts")  # by the commands of the tutorial
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n?", flags=re.M | re.S)
LINES_OF_AN_OUTPUT = 20
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:]+ \| ")  # of fairseq
BEGINNING = "This is [a page of the documentation](tutorial.md) as a notebook, with what its commands printed."


def cells_of(page: str) -> list[nbformat.NotebookNode]:
    """The cells of a page: commands and Python are code, and samples of their output are left out."""
    cells = [new_markdown_cell(BEGINNING), new_code_cell("%cd -q ..")]  # to the folder of the checkout
    position = 0
    for block in BLOCK.finditer(page):
        text = page[position : block.start()].strip()
        position = block.end()
        if text:
            cells.append(new_markdown_cell(text))
        if block[1] == "bash":
            cells.append(new_code_cell(f"%%bash -e\n{block[2].rstrip()}"))
        elif block[1] == "python":
            cells.append(new_code_cell(block[2].rstrip()))
    if page[position:].strip():
        cells.append(new_markdown_cell(page[position:].strip()))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # else they would be drawn anew each time
    return cells


def run(cells: list[nbformat.NotebookNode], folder: Path) -> nbformat.NotebookNode:
    """The notebook of these cells with all that they print, run in ``folder/docs``.

    Raises CellExecutionError if a cell fails.
    """
    (folder / "docs").mkdir()
    for name in NEEDED:
        (folder / name).symlink_to(REPOSITORY / name)
    notebook = new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder / "docs")}})
    # the commands are those of this environment
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    client.execute(env={**os.environ, "PATH": path})
    return notebook


def printed(cell: nbformat.NotebookNode) -> str:
    """The standard output of a cell."""
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stdout")


def tidy(notebook: nbformat.NotebookNode, folders: Sequence[Path]) -> None:
    """Keep what a reader wants to see of the outputs: no progress, no log, no names of ``folders``, no times."""
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        text = printed(cell)
        for folder in folders:
            text = text.replace(f"{folder}/", "")
        lines = text.strip("\n").splitlines()
        logged = [number for number, line in enumerate(lines) if LOG_LINE.match(line)]
        if logged:
            lines = lines[logged[-1] + 1 :]
        if len(lines) > LINES_OF_AN_OUTPUT:
            lines = ["...", *lines[-LINES_OF_AN_OUTPUT:]]
        cell.outputs = [new_output("stream", name="stdout", text="\n".join(lines) + "\n")] if lines else []


def main() -> int:
    """Run the page, and write the notebook."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "tutorial.md")
    parser.add_argument("--output", type=Path, help="(default: beside the page)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        notebook = run(cells_of(args.page.read_text(encoding="utf-8")), Path(folder))
        tidy(notebook, [Path(folder), REPOSITORY])
    nbformat.write(notebook, args.output or args.page.with_suffix(".ipynb"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
