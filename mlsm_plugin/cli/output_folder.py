"""The type of options that name a folder to write to."""

from __future__ import annotations

from pathlib import Path


def output_folder(text: str) -> str:
    """The name of a folder, which need not exist. argparse lets the error through, before any work is done.

    Raises:
        OSError: it is empty, or it or a folder above it is a file.
    """
    if not text:
        raise FileNotFoundError("the name of the folder to write to is empty")
    for path in (Path(text), *Path(text).absolute().parents):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{path} exists and is not a folder; choose another name")
    return text
