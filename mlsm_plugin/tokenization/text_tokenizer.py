"""The tokenizers of this package behind one interface: SentencePiece, or one of Hugging Face (``hf:PATH``)."""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary

from mlsm_plugin.atomic_files import atomic_open, sha256_of_files
from mlsm_plugin.hf_files import is_hf
from mlsm_plugin.tokenization.hf_tokenizer import FOLDER_NAME, HuggingFaceTokenizer
from mlsm_plugin.tokenization.line_encoder import HuggingFaceLineEncoder, LineEncoder, SentencePieceLineEncoder
from mlsm_plugin.tokenization.text_files import PathLike
from mlsm_plugin.tokenization.tokenizer_files import DICTIONARY_NAME, MODEL_NAME, load_tokenizer


class TextTokenizer(ABC):
    """A tokenizer and fairseq's dictionary of it.

    Attributes:
        dictionary: as in ``dict.txt``, without ``<mask>``.
        fingerprint: SHA-256 of the tokenizer.
    """

    dictionary: Dictionary
    fingerprint: str

    @cached_property
    def line_encoder(self) -> LineEncoder:
        """What encodes lines."""
        return self._line_encoder()

    @abstractmethod
    def _line_encoder(self) -> LineEncoder: ...

    @abstractmethod
    def write_to(self, folder: Path) -> None:
        """Write ``dict.txt`` and the tokenizer's files."""

    def ids_of(self, text: str) -> np.ndarray:
        """fairseq's ids of a text, with ``</s>``, int64."""
        ids = self.line_encoder.encode_batch([text]).ids
        return ids if len(ids) else np.array([self.dictionary.eos()])


class SentencePieceTokenizer(TextTokenizer):
    """The folder that ``mlsm tokenizer`` wrote."""

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)
        self.processor = load_tokenizer(folder)
        self.dictionary = Dictionary.load(str(self.folder / DICTIONARY_NAME))
        self.fingerprint = sha256_of_files(self.folder / MODEL_NAME)

    def _line_encoder(self) -> LineEncoder:
        return SentencePieceLineEncoder(self.processor, self.dictionary)

    def write_to(self, folder: Path) -> None:
        """Copy the two files."""
        for name in (MODEL_NAME, DICTIONARY_NAME):
            shutil.copyfile(self.folder / name, folder / name)


class HuggingFaceTextTokenizer(TextTokenizer):
    """A folder or hub name of Hugging Face, or a data folder that was made with one."""

    def __init__(self, path: PathLike) -> None:
        self.tokenizer = HuggingFaceTokenizer(path)
        self.dictionary = Dictionary()
        for symbol in self.tokenizer.symbols:
            self.dictionary.add_symbol(symbol)
        self.fingerprint = hashlib.sha256(self.tokenizer.backend.to_str().encode()).hexdigest()

    def _line_encoder(self) -> LineEncoder:
        return HuggingFaceLineEncoder(self.tokenizer, self.dictionary)

    def write_to(self, folder: Path) -> None:
        """Write ``dict.txt`` and ``hf_tokenizer``."""
        lines = "".join(f"{symbol} 1\n" for symbol in self.tokenizer.symbols)
        (folder / DICTIONARY_NAME).write_text(lines, encoding="utf-8")
        self.tokenizer.save(folder / FOLDER_NAME)


def open_tokenizer(name: PathLike) -> TextTokenizer:
    """The tokenizer that ``name`` means.

    Args:
        name: ``hf:`` and a folder or hub name; or a folder with ``sentencepiece.bpe.model`` or ``hf_tokenizer``
            and ``dict.txt``: of ``mlsm tokenizer``, a data folder, or a run.

    Raises:
        ValueError: there is none, or files that do not belong together.
    """
    if is_hf(name):
        return HuggingFaceTextTokenizer(name)
    if not Path(name, FOLDER_NAME).is_dir():
        return SentencePieceTokenizer(name)
    tokenizer = HuggingFaceTextTokenizer(Path(name, FOLDER_NAME))
    check_dictionary(tokenizer.tokenizer, Path(name))
    return tokenizer


def check_dictionary(tokenizer: HuggingFaceTokenizer, folder: Path) -> None:
    """Raise ValueError unless ``dict.txt`` of a folder is the one made from a tokenizer."""
    path = folder / DICTIONARY_NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; `mlsm binarize` makes it")
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    if [line.rpartition(" ")[0] for line in lines if line] != tokenizer.symbols:
        raise ValueError(
            f"{path} was not made from the tokenizer of {tokenizer.folder}; binarize the text with "
            f"--tokenizer hf:{tokenizer.folder}"
        )


def tokenizer_files(folder: PathLike) -> list[Path]:
    """The files of a data folder or run that loading a tokenizer needs, relative to it."""
    inside = sorted(Path(folder, FOLDER_NAME).glob("*"))
    names = [Path(name) for name in (DICTIONARY_NAME, MODEL_NAME) if Path(folder, name).is_file()]
    return names + [Path(FOLDER_NAME, path.name) for path in inside if path.is_file()]


def copy_tokenizer(source: PathLike, folder: PathLike) -> None:
    """Copy dictionary and tokenizer, each file whole or not at all."""
    for name in tokenizer_files(source):
        os.makedirs(Path(folder, name).parent, exist_ok=True)
        with open(Path(source, name), "rb") as reader, atomic_open(Path(folder, name)) as writer:
            shutil.copyfileobj(reader, writer)


def bpe_options(*folders: PathLike) -> dict[str, str]:
    """fairseq's options of the tokenizer (``bpe`` and its file) that the first of some folders with one holds.

    Raises:
        FileNotFoundError: none has one.
    """
    for folder in folders:
        if Path(folder, MODEL_NAME).is_file():
            return {"bpe": "sentencepiece", "sentencepiece_model": str(Path(folder, MODEL_NAME))}
        if Path(folder, FOLDER_NAME).is_dir():
            return {"bpe": "hf_tokenizer", "hf_tokenizer": str(Path(folder, FOLDER_NAME))}
    raise FileNotFoundError(
        f"{folders[0]} has no tokenizer ({MODEL_NAME} or {FOLDER_NAME}); copy it there from the binarized dataset"
    )
