"""The files of a tokenizer in a data folder and next to checkpoints."""

from __future__ import annotations

import logging
import os
from codecs import BOM_UTF8
from pathlib import Path

from mlsm_plugin.files.atomic_files import copy_file

logger = logging.getLogger(__name__)

MODEL_NAME = "sentencepiece.bpe.model"  # the name that fairseq's hub looks for
DICTIONARY_NAME = "dict.txt"
FOLDER_NAME = "hf_tokenizer"  # in a data folder and next to checkpoints


def tokenizer_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files that are needed to load the tokenizer of a data folder or run, relative to that folder."""
    inside = sorted(Path(folder, FOLDER_NAME).glob("*"))
    names = [Path(name) for name in (DICTIONARY_NAME, MODEL_NAME) if Path(folder, name).is_file()]
    return names + [Path(FOLDER_NAME, path.name) for path in inside if path.is_file()]


def copy_tokenizer(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Copy the dictionary and the tokenizer, each file atomically; what lies beside checkpoints stays as it is.

    Raises:
        ValueError: the folder has checkpoints of another vocabulary.
    """
    names = tokenizer_files(source)
    if any(Path(folder).glob("*.pt")):
        present = [name for name in names if Path(folder, name).is_file()]
        changed = [name for name in present if Path(folder, name).read_bytes() != Path(source, name).read_bytes()]
        dictionary = Path(DICTIONARY_NAME)
        if dictionary in changed and symbols_in(Path(folder, dictionary)) != symbols_in(Path(source, dictionary)):
            raise ValueError(
                f"{folder} has checkpoints of another vocabulary than {source}: their {dictionary} differ; choose "
                "another folder for this run"
            )
        if set(changed) - {dictionary}:
            logger.warning("%s keeps its tokenizer, whose files are not those of %s", folder, source)
        names = [name for name in names if name not in present]
    for name in names:
        os.makedirs(Path(folder, name).parent, exist_ok=True)
        copy_file(Path(source, name), Path(folder, name))


def symbols_in(dictionary: Path) -> tuple[bytes, ...]:
    """The symbols of a ``dict.txt`` without their counts, to compare two files; a byte order mark is none of them."""
    return tuple(line.rpartition(b" ")[0] for line in dictionary.read_bytes().removeprefix(BOM_UTF8).splitlines())


def bpe_options(*folders: str | os.PathLike[str]) -> dict[str, str]:
    """fairseq's options (``bpe`` and its file) for the tokenizer of the first of ``folders`` that has one.

    Raises:
        FileNotFoundError: none of the folders has a tokenizer.
    """
    for folder in folders:
        if Path(folder, MODEL_NAME).is_file():
            return {"bpe": "sentencepiece", "sentencepiece_model": str(Path(folder, MODEL_NAME))}
        if Path(folder, FOLDER_NAME).is_dir():
            return {"bpe": "hf_tokenizer", "hf_tokenizer": str(Path(folder, FOLDER_NAME))}
    raise FileNotFoundError(
        f"{folders[0]} has no tokenizer ({MODEL_NAME} or {FOLDER_NAME}); copy it there from the binarized dataset"
    )
