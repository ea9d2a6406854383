"""Read fairseq's ``dict.txt``."""

import io
from pathlib import Path

from fairseq.data import Dictionary

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, FOLDER_NAME
from mlsm_plugin.core.text import hf_tokenizer


class TextDictionary(Dictionary):
    """The symbols of a ``dict.txt``.

    Attributes:
        own_special: ids of symbols that a Hugging Face tokenizer lists as special tokens without a role, such as
            ``[E1]``; nothing is learned about them.
    """

    own_special: frozenset[int] = frozenset()


def own_special_symbols(dictionary: Dictionary) -> list[int]:
    """The ``own_special`` ids of a :class:`TextDictionary`; empty for other dictionaries."""
    return sorted(getattr(dictionary, "own_special", ()))


def special_symbols(dictionary: Dictionary) -> list[int]:
    """The ids of fairseq's special symbols and of :func:`own_special_symbols`."""
    return [*range(dictionary.nspecial), *own_special_symbols(dictionary)]


def read_symbols(path: PathLike) -> TextDictionary:
    """The dictionary of a ``dict.txt``: a symbol and a count in each line. A byte-order mark at the start is skipped.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, a line has another form, or a symbol occurs twice or is one of fairseq's own.
    """
    try:
        return TextDictionary.load(io.StringIO(Path(path).read_bytes().decode("utf-8-sig"), newline=None))
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
    raise ValueError(
        f"{path} is not a dictionary of fairseq ({reason[:200]}); write it again with `mlsm tokenizer`, or with "
        "`mlsm binarize`"
    )


def symbols_of_dataset(folder: PathLike) -> TextDictionary:
    """The dictionary of a binarized dataset, which knows the special tokens of the tokenizer there.

    FileNotFoundError if the folder has no ``dict.txt``; ValueError as for :func:`read_symbols`, or if the files of a
    Hugging Face tokenizer are damaged.
    """
    path = Path(folder) / DICTIONARY_NAME
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} is not a binarized dataset: {DICTIONARY_NAME} is missing (write one: `mlsm binarize`)"
        )
    dictionary = read_symbols(path)
    symbols = hf_tokenizer.own_special_symbols(Path(folder, FOLDER_NAME))
    dictionary.own_special = frozenset(dictionary.index(symbol) for symbol in symbols if symbol in dictionary)
    return dictionary
