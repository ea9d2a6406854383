"""One interface for the tokenizers of this package: SentencePiece and Hugging Face (``hf:PATH``)."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece as spm
from fairseq.data import Dictionary
from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass
from fairseq.tokenizer import tokenize_line

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import FILES as TOKENIZER_FILES
from mlsm_plugin.core.files.hf_files import hf_folder, is_hf
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, FOLDER_NAME, MODEL_NAME, tokenizer_files
from mlsm_plugin.core.masking.word_boundaries import PieceClasses
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import dictionary_pieces
from mlsm_plugin.fairseq_plugin.text.symbol_files import read_symbols


@dataclass
class EncodedBatch:
    """The sentences of a batch of consecutive lines."""

    ids: np.ndarray  # fairseq's ids (n_tokens,); each sentence and each document boundary ends in </s>
    lengths: np.ndarray  # number of tokens of each sentence (n_sentences,); 1 for a document boundary (</s> alone)
    boundary_before: bool  # whether a blank line comes before the first sentence
    boundary_after: bool  # whether a blank line comes after the last sentence
    dropped: int  # number of lines with characters but without tokens, such as a zero-width space
    unknown: UnknownTokens  # of the text, without </s>


class TextTokenizer(ABC):
    """A tokenizer and the fairseq dictionary of its symbols; it converts lines to fairseq's ids."""

    dictionary: Dictionary  # the symbols of dict.txt, without <mask>
    fingerprint: str  # SHA-256 of the tokenizer
    table: np.ndarray  # fairseq's id for each id of the tokenizer, then for </s> (V + 1,)

    @abstractmethod
    def pieces_of(self, line: str, unknown: UnknownTokens) -> list[int]:
        """The tokenizer's ids of a line; adds the line to the counts in ``unknown``."""

    @abstractmethod
    def write_to(self, folder: Path) -> None:
        """Write ``dict.txt`` and the tokenizer's files."""

    def encode_batch(self, lines: list[str]) -> EncodedBatch:
        """Encode lines. Blank lines between two sentences become one document boundary."""
        pieces: list[int] = []
        lengths: list[int] = []
        unknown = UnknownTokens()
        dropped = 0
        end = len(self.table) - 1
        boundary_before = False
        pending = False
        for line in lines:
            if not line:
                pending = True
                continue
            sentence = self.pieces_of(line, unknown)
            if not sentence:
                dropped += 1
                continue
            if pending and lengths:
                pieces.append(end)
                lengths.append(1)
            elif pending:
                boundary_before = True
            pending = False
            pieces += [*sentence, end]
            lengths.append(len(sentence) + 1)
        ids = self.table[np.array(pieces, dtype=np.int64)]
        return EncodedBatch(ids, np.array(lengths, dtype=np.int64), boundary_before, pending, dropped, unknown)


class SentencePieceTokenizer(TextTokenizer):
    """The SentencePiece tokenizer in a folder that ``mlsm tokenizer`` wrote.

    Its ids are the same as ``dictionary.encode_line(" ".join(processor.encode(line)))``. ValueError if a file is
    missing or damaged, or ``dict.txt`` was not made from the model.
    """

    def __init__(self, folder: PathLike) -> None:
        model = Path(folder, MODEL_NAME)
        dictionary = Path(folder, DICTIONARY_NAME)
        for path in (model, dictionary):
            if not path.is_file():
                raise ValueError(f"{path} does not exist; `mlsm tokenizer --output {folder}` makes it")
        self._model = model.read_bytes()
        self.processor = spm.SentencePieceProcessor()
        try:
            self.processor.load_from_serialized_proto(self._model)
        except RuntimeError:
            advice = f"`mlsm tokenizer --output {folder}` makes it"
            raise ValueError(f"{model} is not a SentencePiece model; {advice}") from None
        self.dictionary = read_symbols(dictionary)
        if self.dictionary.symbols[self.dictionary.nspecial :] != dictionary_pieces(self.processor):
            raise ValueError(
                f"{dictionary} was not made from {MODEL_NAME} in the same folder; run `mlsm tokenizer` again"
            )
        self.fingerprint = hashlib.sha256(self._model).hexdigest()
        pieces = map(self.processor.id_to_piece, range(len(self.processor)))
        self.table = np.array([*map(self.dictionary.index, pieces), self.dictionary.eos()], dtype=np.int64)

    def pieces_of(self, line: str, unknown: UnknownTokens) -> list[int]:
        """The SentencePiece ids of a line; unknown pieces are split at whitespace such as U+0085, as in fairseq."""
        sentence: list[int] = self.processor.encode(line, out_type=int)
        unknown.count_characters(line)
        if (unknown_id := self.processor.unk_id()) in sentence:
            pieces = sentence
            sentence = []
            for piece, surface in zip(pieces, self.processor.encode(line, out_type=str), strict=True):
                words = tokenize_line(surface) if piece == unknown_id else [surface]
                sentence += [piece] * len(words)
                if piece == unknown_id:
                    for word in words:
                        unknown.add_unknown(word)
        unknown.tokens += len(sentence)
        return sentence

    def write_to(self, folder: Path) -> None:
        """Copy the model, and write ``dict.txt`` in fairseq's format, without a byte-order mark."""
        (folder / MODEL_NAME).write_bytes(self._model)
        self.dictionary.save(str(folder / DICTIONARY_NAME))


class HuggingFaceTextTokenizer(TextTokenizer):
    """A Hugging Face tokenizer, from a local folder or the hub (``hf:PATH``)."""

    def __init__(self, path: PathLike) -> None:
        self.tokenizer = HuggingFaceTokenizer(path)
        self.dictionary = Dictionary()
        for symbol in self.tokenizer.symbols:
            self.dictionary.add_symbol(symbol)
        self.fingerprint = hashlib.sha256(self.tokenizer.backend.to_str().encode()).hexdigest()
        self.table = np.append(self.tokenizer.fairseq_ids, self.dictionary.eos())

    def pieces_of(self, line: str, unknown: UnknownTokens) -> list[int]:
        sentence, offsets = self.tokenizer.encoded_text(line)
        unknown.add(line, sentence, offsets, self.tokenizer.unknown_id)
        return sentence

    def write_to(self, folder: Path) -> None:
        self.dictionary.save(str(folder / DICTIONARY_NAME))
        self.tokenizer.save(folder / FOLDER_NAME)


def open_tokenizer(name: PathLike) -> TextTokenizer:
    """Open a tokenizer: ``hf:`` and a folder or hub name, or a folder with ``dict.txt`` and either
    ``sentencepiece.bpe.model`` or ``hf_tokenizer``, such as the output of ``mlsm tokenizer``, a data folder, or a run.
    ValueError if there is no tokenizer, or its files do not belong together.
    """
    if is_hf(name):
        return HuggingFaceTextTokenizer(name)
    if not Path(name, FOLDER_NAME).is_dir():
        return SentencePieceTokenizer(name)
    tokenizer = HuggingFaceTextTokenizer(Path(name, FOLDER_NAME))
    tokenizer.tokenizer.check_dictionary(Path(name))
    return tokenizer


def tokenizer_inputs(name: PathLike) -> list[Path]:
    """The files of a tokenizer that :func:`open_tokenizer` opens; ValueError if it cannot be reached."""
    if is_hf(name):
        folder = hf_folder(name)
        return sorted(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))
    return [Path(name, file) for file in tokenizer_files(name)]


SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@dataclass
class HuggingFaceBPEConfig(FairseqDataclass):
    """Options of the tokenizer."""

    hf_tokenizer: str = field(default="???", metadata={"help": "folder of the tokenizer (DATA_BIN/hf_tokenizer)"})


@register_bpe("hf_tokenizer", dataclass=HuggingFaceBPEConfig)
class HuggingFaceBPE:
    """Converts text to the symbols of ``dict.txt``, separated by spaces, and back."""

    def __init__(self, cfg: HuggingFaceBPEConfig) -> None:
        self.tokenizer = HuggingFaceTokenizer(cfg.hf_tokenizer)

    def encode(self, text: str) -> str:
        return " ".join(self.tokenizer.symbols_of(text))

    def surfaces(self, text: str) -> list[str]:
        """The part of a text that each symbol of :meth:`encode` stands for."""
        return self.tokenizer.surfaces_of(text)

    def encode_after_a_gap(self, text: str) -> str:
        """As :meth:`encode`, for text after a mask; see :meth:`HuggingFaceTokenizer.symbols_after_a_gap`."""
        return " ".join(self.tokenizer.symbols_after_a_gap(text))

    def decode(self, text: str) -> str:
        return self.tokenizer.text_of(text.split())

    @cached_property
    def _begin_words(self) -> frozenset[str]:
        names = [*SPECIAL, *self.tokenizer.symbols]
        begins = PieceClasses.of_vocabulary(names, range(len(SPECIAL))).begins_word
        return frozenset([*SPECIAL, *(name for name, begin in zip(names, begins, strict=True) if begin)])

    def is_beginning_of_word(self, symbol: str) -> bool:
        """Whether a word begins with this symbol (``--mask-whole-words``)."""
        return symbol in self._begin_words
