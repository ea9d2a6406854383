"""Check that a command does not write to a file that it reads."""

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, check_output_file
from mlsm_plugin.core.files.hf_files import HF_PREFIX
from mlsm_plugin.core.files.model_folders import FILES_OF_MODELS

# files of a checkpoint, a dataset, codes, a dictionary or a datastore, beside those of a model of Hugging Face
FILES_OF_FOLDERS = ("*.pt", "*.bin", "*.idx", "*.npy", "*.safetensors", "dict.txt", "meta.json", "binarize.json")


def check_output(path: PathLike, inputs: Iterable[PathLike]) -> None:
    """Raise ValueError if ``path`` cannot be written or would replace an input; to be called before hours of work."""
    check_output_file(path)
    check_no_input(path, inputs)


def check_no_input(path: PathLike, inputs: Iterable[PathLike]) -> None:
    """Raise ValueError if ``path`` is an input of the command, or part of an input folder.

    Other files may lie in such a folder, for example figures beside a model. Inputs that do not exist, such as hub
    names, are not compared.
    """
    for source in inputs:
        location = Path(os.fspath(source).removeprefix(HF_PREFIX))
        if os.path.exists(path) and location.is_file() and os.path.samefile(path, location):
            raise ValueError(f"{path} is the output and also an input, which it would replace; name another output")
        if location.is_dir() and _is_part(Path(path), location):
            raise ValueError(
                f"{path} is named like a part of {location}, which is an input; choose another name or folder for the "
                "output"
            )


def _is_part(path: Path, folder: Path) -> bool:
    """Whether a file lies in or below a folder and is named like a file of a model or a dataset."""
    patterns = (*FILES_OF_MODELS, *FILES_OF_FOLDERS)
    inside = folder.resolve() in path.resolve().parents
    return inside and any(fnmatch(path.name, pattern) for pattern in patterns)
