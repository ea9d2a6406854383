"""The first labelled texts of a file, for comparisons in which labels are few; imported by the other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import atomic_open


def check_tasks(labelled: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if the training files of two tasks are in folders of the same name, which names the task."""
    names = [Path(train).parent.name for train, _ in labelled]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two files of --labelled are in a folder called {name!r}; put each into one of its own")


def first_lines(path: str, number: int, output: Path) -> Path:
    """A file below ``output`` with the first lines of ``path``; it is made once, and named after the task's folder."""
    shortened = output / "labelled" / Path(path).parent.name / "train.tsv"
    if not shortened.exists():
        shortened.parent.mkdir(parents=True, exist_ok=True)
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        with atomic_open(shortened, "w") as file:
            file.writelines(lines[:number])
    return shortened
