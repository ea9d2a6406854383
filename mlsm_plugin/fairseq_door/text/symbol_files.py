"""Read fairseq's ``dict.txt``."""

import hashlib
import io
from pathlib import Path

from fairseq.data import Dictionary

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME


def read_symbols(path: PathLike) -> Dictionary:
    """The dictionary of a ``dict.txt``: a symbol and a count in each line. A byte-order mark at the start is skipped.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, a line has another form, or a symbol occurs twice or is one of fairseq's own.
    """
    try:
        return Dictionary.load(io.StringIO(Path(path).read_bytes().decode("utf-8-sig"), newline=None))
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
    raise ValueError(
        f"{path} is not a dictionary of fairseq ({reason[:200]}); write it again with `mlsm tokenizer`, or with "
        "`mlsm binarize`"
    )


def symbols_of_dataset(folder: PathLike) -> Dictionary:
    """The dictionary of a binarized dataset.

    FileNotFoundError if the folder has no ``dict.txt``; ValueError as of :func:`read_symbols`.
    """
    path = Path(folder) / DICTIONARY_NAME
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} is not a binarized dataset: {DICTIONARY_NAME} is missing (write one: `mlsm binarize`)"
        )
    return read_symbols(path)


def symbols_fingerprint(dictionary: Dictionary) -> str:
    """SHA-256 of the symbols of a ``dict.txt``, without those that a task adds; their counts do not matter."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()
