"""Find checkpoints and tokenizers in a folder, with helpful errors if they are missing."""

import difflib
import logging
import os
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, copy_file

PREFERRED_CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
NUMBERED = re.compile(r"checkpoint(_\d+_)?\d+\.pt")  # of an epoch, or of an epoch and an update
SHOWN_NAMES = 6


def checkpoint_of(path: PathLike, checkpoint_file: str | None = None) -> Path:
    """The checkpoint at ``path``: the file itself, or the checkpoint to load from the ``--save-dir`` of a run.

    From a folder, ``checkpoint_file`` is loaded. If it is None: ``model.pt``, else the best, else the last, else the
    highest-numbered, else the only checkpoint. FileNotFoundError if there is none, or the choice is not clear.
    """
    path = Path(path)
    if checkpoint_file is None or path.is_file():
        return only_checkpoint(path, preferred=True)
    if not (path / checkpoint_file).is_file():
        names = _names(path, "checkpoint")  # raises an error that says what is missing
        raise FileNotFoundError(f"{path} has no {checkpoint_file}; it has {names}")
    return path / checkpoint_file


def only_checkpoint(path: PathLike, kind: str = "checkpoint", *, preferred: bool = False) -> Path:
    """The checkpoint at ``path``: the file itself, or the only checkpoint in a folder. Errors call it a ``kind``.

    If there are several, ``preferred`` chooses as :func:`checkpoint_of` does; without it, FileNotFoundError.
    """
    path = Path(path)
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


def _names(folder: Path, kind: str) -> list[str]:
    """The names of the checkpoints of a folder, at least one."""
    if not folder.is_dir():
        raise missing_checkpoint(folder, kind)
    names = sorted(file.name for file in folder.glob("*.pt"))
    if not names and (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no checkpoint (*.pt), but a model of Hugging Face: where both can be used, it is hf:{folder}"
        )
    if not names:
        raise FileNotFoundError(f"{folder} has no checkpoint (*.pt); pass the --save-dir of a training run")
    return names


def missing_checkpoint(path: PathLike, kind: str = "checkpoint") -> FileNotFoundError:
    """The error for a missing file of a ``kind``; it lists the checkpoints with the most similar names."""
    path = Path(path)
    if path.suffix != ".pt":
        return FileNotFoundError(f"{path} does not exist; pass the --save-dir of a training run, or a checkpoint")
    names = [file.name for file in path.parent.glob("*.pt")]
    nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0)
    available = f"; {path.parent} has {_listed(nearest, len(names))}" if names else ""
    return FileNotFoundError(f"{kind} {path} does not exist{available}")


def _listed(names: Sequence[str], number: int | None = None) -> str:
    further = (number or len(names)) - len(names[:SHOWN_NAMES])
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {further} more" if further else "")


logger = logging.getLogger(__name__)

MODEL_NAME = "sentencepiece.bpe.model"  # the name that fairseq's hub looks for
DICTIONARY_NAME = "dict.txt"
DICTIONARIES = (DICTIONARY_NAME, "input0/dict.txt", "label/dict.txt")  # the last two: of a classifier
FOLDER_NAME = "hf_tokenizer"  # in a data folder and next to checkpoints
SUMMARY_NAME = "binarize.json"  # summary of a data folder, written by `mlsm binarize`
OVERWRITE = b" #fairseq:overwrite"  # ends the line of a symbol that is named like a special symbol of fairseq


def tokenizer_files(folder: PathLike) -> list[Path]:
    """The files needed to load the tokenizer of a data folder or run, relative to that folder."""
    inside = sorted(Path(folder, FOLDER_NAME).glob("*"))
    names = [Path(name) for name in (DICTIONARY_NAME, MODEL_NAME) if Path(folder, name).is_file()]
    return names + [Path(FOLDER_NAME, path.name) for path in inside if path.is_file()]


def copy_tokenizer(source: PathLike, folder: PathLike) -> None:
    """Copy the dictionary and the tokenizer, each file atomically; existing files beside checkpoints are kept.

    ValueError if the folder has checkpoints of another vocabulary, or a tokenizer of another kind.
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
    else:
        _check_no_other_tokenizer(names, Path(folder))
    for name in names:
        os.makedirs(Path(folder, name).parent, exist_ok=True)
        copy_file(Path(source, name), Path(folder, name))


def _check_no_other_tokenizer(names: Sequence[Path], folder: Path) -> None:
    """Raise ValueError if a folder has a tokenizer of another kind than ``names``, which would be read instead."""
    kinds = {name.parts[0] for name in names} & {MODEL_NAME, FOLDER_NAME}
    for name in tokenizer_files(folder):
        kind = name.parts[0]
        if kinds and kind in (MODEL_NAME, FOLDER_NAME) and kind not in kinds:
            raise ValueError(
                f"{folder / kind} is the tokenizer of another dataset; delete it, or choose another folder"
            )


def copy_dicts(source: PathLike, folder: PathLike) -> None:
    """Copy the dictionaries of texts and labels that a classifier needs besides its tokenizer, if there are any."""
    for name in (name for name in DICTIONARIES[1:] if Path(source, name).is_file()):
        Path(folder, name).parent.mkdir(exist_ok=True)
        copy_file(Path(source, name), Path(folder, name))


def symbols_in(dictionary: Path) -> tuple[bytes, ...]:
    """The symbols of a ``dict.txt`` without their counts and without a byte order mark, to compare two files."""
    lines = dictionary.read_bytes().removeprefix(BOM_UTF8).splitlines()
    return tuple(line.rstrip().removesuffix(OVERWRITE).rpartition(b" ")[0] for line in lines)


def bpe_options(*folders: PathLike) -> dict[str, str]:
    """fairseq's options (``bpe`` and its file) for the tokenizer of the first folder that has one.

    FileNotFoundError if no folder has one.
    """
    for folder in folders:
        if Path(folder, MODEL_NAME).is_file():
            return {"bpe": "sentencepiece", "sentencepiece_model": str(Path(folder, MODEL_NAME))}
        if Path(folder, FOLDER_NAME).is_dir():
            return {"bpe": "hf_tokenizer", "hf_tokenizer": str(Path(folder, FOLDER_NAME))}
    raise FileNotFoundError(
        f"{folders[0]} has no tokenizer ({MODEL_NAME} or {FOLDER_NAME}); copy it there from the binarized dataset"
    )
