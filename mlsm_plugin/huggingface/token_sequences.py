"""Sequences of token ids for a Hugging Face model, with the position of each token in the whole corpus."""

import array
import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory, read_json, write_json
from mlsm_plugin.core.files.hf_files import first_line
from mlsm_plugin.core.files.json_checks import check_json, fields, number, text, whole
from mlsm_plugin.core.files.npy_files import map_npy
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.hidden_states.hf_encoder import check_positions
from mlsm_plugin.core.masking.token_ids import check_attention, checked_ids, no_ids
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens

# columns of a dataset
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
IDS_FILE = "ids.npy"
STARTS_FILE = "starts.npy"
ABOUT_FILE = "meta.json"
IDS_DTYPE = np.dtype("<i4")
STARTS_DTYPE = np.dtype("<i8")
SEQUENCES_AT_ONCE = 1024
DATASET_FILES = ("dataset_info.json", "state.json")  # of a dataset saved by ``datasets``
SPLITS_FILE = "dataset_dict.json"  # of several splits
ABOUT_CHECK = fields(known={"tokenizer": text, "max_length": whole(1), "max_unk_rate": number})
READABLE_SEQUENCES = (
    "pass a folder that `mlsm binarize --format sequences` wrote for a split, an .npy file (n, T), or a folder of "
    "datasets.Dataset.save_to_disk"
)


class Rows(Protocol):
    """Sequences by index: a list, an array, a column or a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


InputIds = PathLike | Rows  # see TokenSequences


class TokenSequences:
    """A corpus as sequences of ids, including special tokens, in a fixed order.

    The position of a token is its index in the whole corpus, from 0, and its row in a code store. ValueError if there
    is no token, an id is negative or not a whole number, the ``attention_mask`` of a dataset leaves out text, the file
    or folder is damaged or of another kind, or ``datasets`` is needed but not installed.

    Args:
        input_ids: a list of lists or arrays ``(T_i,)``; an array or memory map ``(n, T)``; the column ``input_ids`` of
            a ``datasets.Dataset``, or the dataset itself; or the path of a folder written by :meth:`write`, of an
            ``.npy`` file ``(n, T)``, or of a folder written by ``datasets.Dataset.save_to_disk``.

    Attributes:
        starts: ``(n + 1,)`` int64, the position of the first token of each sequence, then the number of all tokens.
        about: the record that was passed to :meth:`write`; empty for other kinds of ``input_ids``.
        path: the path that was passed as ``input_ids``; None for other kinds.
        attended: the column ``attention_mask`` of a dataset, which is checked; None: no such column.
    """

    def __init__(self, input_ids: InputIds) -> None:
        self.about: dict[str, Any] = {}
        self.path: str | None = None
        if isinstance(input_ids, (str, os.PathLike)):
            self.path = os.path.abspath(input_ids)
            input_ids, self.about = _opened(Path(input_ids))
        self._ids = _ids_of(input_ids)
        self.attended = _column(input_ids, ATTENTION_MASK)
        self.starts = np.concatenate([[0], np.cumsum(_lengths(self._ids), dtype=np.int64)])
        if self.num_tokens == 0:
            raise ValueError("the text has no token; pass sequences of input_ids that are not empty")

    @classmethod
    def of(cls, input_ids: InputIds) -> "TokenSequences":
        """``input_ids`` itself if it is a :class:`TokenSequences`, else a new corpus of it."""
        return input_ids if isinstance(input_ids, cls) else cls(input_ids)

    @property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return int(self.starts[-1])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """The ids of a sequence, ``(T,)`` int64."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = checked_ids(self._ids[index], f"sequence {index}")
        if self.attended is not None:
            check_attention(ids, self.attended[index], f"sequence {index}")
        return ids

    def check_positions(self, positions: int, name: str = "") -> None:
        """Raise ValueError if a sequence of these, called ``name``, has more tokens than a model's ``positions``."""
        lengths = np.diff(self.starts)
        longest = int(lengths.argmax())
        number = f"sequence {longest}"
        check_positions(int(lengths[longest]), positions, f"{number} of {name}" if name else number)

    def check_made_with(self, vocabulary: str, name: str, owner: str, *, remedy: str) -> None:
        """Raise ValueError if these sequences, called ``name``, were made with another vocabulary.

        ``vocabulary`` is the ``vocabulary_fingerprint`` of the ``owner``. Sequences without a record are accepted.
        """
        if self.about.get("tokenizer") not in (None, vocabulary):
            raise ValueError(
                f"{name} were made with a tokenizer of another vocabulary than that of {owner}: the same ids mean "
                f"other tokens; {remedy}"
            )

    def part(self, first: int, last: int) -> "TokenSequences":
        """A new corpus of the sequences from ``first`` up to, not including, ``last``; ValueError if it is empty."""
        part = TokenSequences(self._ids[first:last])
        part.about = self.about
        part.path = self.path
        part.attended = None if self.attended is None else self.attended[first:last]
        return part

    def unknown_tokens(self, tokenizer: HuggingFaceTokenizer) -> UnknownTokens:
        """The number of unknown tokens of the tokenizer that made the sequences; reads all ids."""
        unknown = UnknownTokens()
        special = np.array(sorted(tokenizer.special_ids))
        for first in range(0, len(self), SEQUENCES_AT_ONCE):
            ids = np.concatenate([self[index] for index in range(len(self))[first : first + SEQUENCES_AT_ONCE]])
            ids = ids[~np.isin(ids, special)]
            unknown.tokens += len(ids)
            unknown.unknown += int((ids == tokenizer.unknown_id).sum())
        return unknown

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all ids and lengths, in order; computed once, and the same for every kind of ``input_ids``."""
        return self._fingerprint_and_largest[0]

    @property
    def largest_id(self) -> int:
        """The largest id; computed together with :attr:`fingerprint`."""
        return self._fingerprint_and_largest[1]

    @cached_property
    def _fingerprint_and_largest(self) -> tuple[str, int]:
        digest = hashlib.sha256()
        largest = 0
        for index in Progress(range(len(self)), desc="reading the ids", unit="sequence", leave=False):
            ids = self[index]
            digest.update(np.array([len(ids)], STARTS_DTYPE).tobytes())
            digest.update(ids.astype(IDS_DTYPE).tobytes())
            largest = max(largest, int(ids.max(initial=0)))
        return digest.hexdigest(), largest

    @classmethod
    def write(
        cls,
        folder: PathLike,
        sequences: Iterable[Sequence[int] | np.ndarray],
        *,
        about: dict[str, object] | None = None,
    ) -> "TokenSequences":
        """Write sequences to a folder atomically, and open them; only a few are in memory at a time.

        The files are ``ids.npy`` (int32), ``starts.npy`` (int64), and ``meta.json`` with ``about``, for example
        ``tokenizer``, the ``vocabulary_fingerprint`` of the tokenizer. ValueError as for the class; OSError if the
        folder cannot be written.
        """
        starts = array.array("q", [0])
        with atomic_directory(folder) as temporary:
            with open(temporary / IDS_FILE, "wb") as file:
                _write_header(file, 0)
                begin = file.tell()
                for index, sequence in enumerate(sequences):
                    ids = checked_ids(sequence, f"sequence {index}")
                    starts.append(starts[-1] + len(ids))
                    file.write(ids.astype(IDS_DTYPE).tobytes())
                file.seek(0)
                _write_header(file, starts[-1])
                assert file.tell() == begin, "numpy leaves room for any number of values"
                file.flush()
                os.fsync(file.fileno())
            if not starts[-1]:
                raise ValueError("the text has no token")
            np.save(temporary / STARTS_FILE, np.array(starts, STARTS_DTYPE))
            if about:
                write_json(temporary / ABOUT_FILE, about)
        return cls(folder)


class _Rows:
    """A list-like view of the sequences in a folder of :meth:`TokenSequences.write`; nothing is copied."""

    def __init__(self, flat: np.ndarray, starts: np.ndarray) -> None:
        self.flat = flat
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int | slice) -> "np.ndarray | _Rows":
        if isinstance(index, slice):
            first, last, _ = index.indices(len(self))
            return _Rows(self.flat, self.starts[first : max(first, last) + 1])
        return self.flat[self.starts[index] : self.starts[index + 1]]


def _write_header(file: IO[bytes], number: int) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": IDS_DTYPE.str, "fortran_order": False, "shape": (number,)})


def _opened(path: Path) -> tuple[Rows, dict[str, Any]]:
    """The sequences in a file or folder, and the record about them."""
    if path.is_file():
        if path.suffix != ".npy":
            raise ValueError(f"{path} is not an .npy file; {READABLE_SEQUENCES}")
        return map_npy(path, ndim=2), {}
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; {READABLE_SEQUENCES}")
    if not any((path / name).exists() for name in (IDS_FILE, STARTS_FILE)):
        return _saved_dataset(path), {}
    flat = map_npy(path / IDS_FILE, ndim=1)
    starts = map_npy(path / STARTS_FILE, ndim=1)
    about_file = path / ABOUT_FILE
    about = check_json(read_json(about_file), ABOUT_CHECK, about_file) if about_file.exists() else {}
    ascending = len(starts) > 1 and starts[0] == 0 and bool((np.diff(starts) >= 0).all())
    if not ascending or starts[-1] != len(flat) or (flat.dtype, starts.dtype) != (IDS_DTYPE, STARTS_DTYPE):
        raise ValueError(f"{path} does not hold token sequences, or is damaged; write them again")
    return _Rows(flat, starts), about


def _saved_dataset(folder: Path) -> Rows:
    """The dataset of Hugging Face's ``datasets`` in a folder."""
    if (folder / SPLITS_FILE).exists():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ValueError(f"{folder} holds several splits; pass the folder of one of them ({splits})")
    if not any((folder / name).exists() for name in DATASET_FILES):
        raise ValueError(f"{folder} holds no token sequences; {READABLE_SEQUENCES}")
    try:
        from datasets import load_from_disk
    except ImportError:
        raise ValueError(f"{folder} is a dataset of Hugging Face, which needs: pip install datasets") from None
    try:
        return load_from_disk(folder)
    except Exception as error:  # datasets has no common error for damaged files
        raise ValueError(f"the dataset in {folder} cannot be read: {first_line(error)}") from None


def _ids_of(sequences: Rows) -> Rows:
    """The column ``input_ids`` of a ``datasets.Dataset``; other kinds already are ids."""
    names = getattr(sequences, "column_names", None)
    if names is None:
        return sequences
    ids = _column(sequences, INPUT_IDS)
    if ids is None:
        raise ValueError(f"the dataset has no column {INPUT_IDS}, only {', '.join(names)}; tokenize it first")
    return ids


def _column(dataset: Any, name: str) -> Rows | None:
    """A column of a ``datasets.Dataset``; None if the column is missing, or it is not a dataset."""
    if name in (getattr(dataset, "column_names", None) or ()):
        return dataset.with_format("numpy", columns=[name])[name]
    return None


def _lengths(ids: Rows) -> np.ndarray:
    if isinstance(ids, _Rows):
        return np.diff(ids.starts)
    if isinstance(ids, np.ndarray) and ids.ndim == 2:
        return np.full(len(ids), ids.shape[1])
    lengths = array.array("q")
    for first in Progress(range(0, len(ids), SEQUENCES_AT_ONCE), desc="counting tokens", unit="batch", leave=False):
        for sequence in ids[first : first + SEQUENCES_AT_ONCE]:
            try:
                lengths.append(len(sequence))
            except TypeError:
                raise no_ids(f"sequence {len(lengths)}") from None
    return np.array(lengths)
