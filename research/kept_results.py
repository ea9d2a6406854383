"""What a comparison keeps in its output folder: its settings, and each result; imported by the programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlsm_plugin.core.files.atomic_files import PathLike, read_json, sha256_of_files, write_json
from mlsm_plugin.core.files.output_lock import hold_lock
from mlsm_plugin.core.files.planned_folder import PlannedFolder

ADVICE = "Give another --output, or the settings that it was begun with"


def planned_folder(
    args: argparse.Namespace, inputs: Mapping[str, Sequence[PathLike]], *, may_change: Collection[str], seal_file: str
) -> PlannedFolder:
    """The output folder, with the options and the contents of the input files that decide the results.

    Args:
        args: the options.
        inputs: the files that each of these options names.
        may_change: options that decide no result, or whose value is part of the names of results.
        seal_file: the file with the results.

    Raises:
        OSError: an input cannot be read.
    """
    contents = {name: sha256_of_files(*files) for name, files in inputs.items()}
    settings = {name: value for name, value in vars(args).items() if name not in (*inputs, *may_change)}
    plan = {"settings": settings, "inputs": contents}
    return PlannedFolder(args.output, plan, seal_file=seal_file, advice=ADVICE)


def files_of(args: argparse.Namespace) -> dict[str, list[PathLike]]:
    """The files of ``--text``, ``--valid`` and ``--labelled``, by option."""
    labelled = [file for files in args.labelled for file in files]
    return {"text": [args.text], "valid": [args.valid], "labelled": labelled}


def begin(make_folder: Callable[[], PlannedFolder]) -> None:
    """Begin or resume a folder, which no other process may use; SystemExit, with one line, if that cannot be."""
    try:
        folder = make_folder()
        folder.check()
        hold_lock(folder.directory)
        folder.begin()
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


class KeptResults:
    """A comparison that keeps each result in a JSON file of its output folder, and does not compute it again."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.output = Path(args.output)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The content of ``name.json``; if the file does not exist, ``compute`` computes it."""
        path = self.output / f"{name}.json"
        if not path.exists():
            write_json(path, compute())
        return read_json(path)
