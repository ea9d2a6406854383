"""Find the checkpoint of a run."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

PREFERRED_CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
NUMBERED = re.compile(r"checkpoint(_\d+_)?\d+\.pt")  # of an epoch, or of an epoch and an update
SHOWN_NAMES = 6


def checkpoint_of(path: str | os.PathLike[str], checkpoint_file: str | None = None) -> Path:
    """The checkpoint at ``path``: the file itself, or the one to load if ``path`` is a folder.

    Args:
        path: a checkpoint, or the ``--save-dir`` of a run.
        checkpoint_file: name of the checkpoint in the folder; None: ``model.pt``, else the best, else the last, else
            the highest-numbered one, else the only one.

    Raises:
        FileNotFoundError: the folder or the checkpoint does not exist, or there are several to choose from.
    """
    path = Path(path)
    if checkpoint_file is None or path.is_file():
        return _only(path, preferred=True)
    if not (path / checkpoint_file).is_file():
        names = _names(path)  # raises an error that says what is missing
        raise FileNotFoundError(f"{path} has no {checkpoint_file}; it has {names}")
    return path / checkpoint_file


def only_checkpoint(path: str | os.PathLike[str], kind: str = "checkpoint") -> Path:
    """The checkpoint at ``path``: the file itself, or the only one of a folder.

    Args:
        path: a checkpoint or a folder.
        kind: how an error calls the checkpoint.

    Raises:
        FileNotFoundError: it does not exist, or the folder has several.
    """
    return _only(Path(path), preferred=False, kind=kind)


def _only(path: Path, *, preferred: bool, kind: str = "checkpoint") -> Path:
    if path.is_file():
        return path
    names = _names(path, kind)
    numbered = [name for name in names if NUMBERED.fullmatch(name)]
    newest = sorted(numbered, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])[-1:]
    first = [name for name in (*PREFERRED_CHECKPOINTS, *newest) if name in names]
    if len(names) > 1 and not (preferred and first):
        raise FileNotFoundError(
            f"{path} has several checkpoints ({_listed(names)}); pass one of them, such as {path / (first or names)[0]}"
        )
    return path / (first or names)[0]


def _names(folder: Path, kind: str = "checkpoint") -> list[str]:
    """The names of the checkpoints of a folder, at least one."""
    if not folder.is_dir():
        raise missing_checkpoint(folder, kind)
    names = sorted(file.name for file in folder.glob("*.pt"))
    if not names:
        raise FileNotFoundError(f"{folder} has no checkpoint (*.pt); pass the --save-dir of a training run")
    return names


def missing_checkpoint(path: str | os.PathLike[str], kind: str = "checkpoint") -> FileNotFoundError:
    """The error for a checkpoint or folder that does not exist; it names the checkpoints whose names are nearest.

    Args:
        path: what was asked for.
        kind: how the error calls it.
    """
    path = Path(path)
    if path.suffix != ".pt":
        return FileNotFoundError(f"{path} does not exist; pass the --save-dir of a training run, or a checkpoint")
    names = [file.name for file in path.parent.glob("*.pt")]
    nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0)
    there = f"; {path.parent} has {_listed(nearest, len(names))}" if names else ""
    return FileNotFoundError(f"{kind} {path} does not exist{there}")


def _listed(names: Sequence[str], number: int | None = None) -> str:
    further = (number or len(names)) - len(names[:SHOWN_NAMES])
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {further} more" if further else "")
