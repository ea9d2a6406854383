"""The first labelled texts of a file, for comparisons in which labels are few; imported by the other programs."""

from __future__ import annotations

from pathlib import Path

from mlsm_plugin.core.files.atomic_files import atomic_open


def first_lines(path: str, number: int, output: Path) -> Path:
    """A file below ``output`` with the first lines of ``path``; it is made once, and named after the task's folder."""
    shortened = output / "labelled" / Path(path).parent.name / "train.tsv"
    if not shortened.exists():
        shortened.parent.mkdir(parents=True, exist_ok=True)
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        with atomic_open(shortened, "w") as file:
            file.writelines(lines[:number])
    return shortened
