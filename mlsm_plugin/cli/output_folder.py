"""The type of options that name a folder to write to."""

from __future__ import annotations

import argparse
from pathlib import Path


def output_folder(text: str) -> str:
    """The name of a folder, which need not exist; argparse reports the error before any work is done.

    Raises:
        argparse.ArgumentTypeError: it is empty, or it or a folder above it is a file.
    """
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; name a folder")
    for path in (Path(text), *Path(text).absolute().parents):
        if path.exists() and not path.is_dir():
            raise argparse.ArgumentTypeError(f"{path} is a file; name a folder")
    return text
