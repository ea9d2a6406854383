"""The text that the ids of a binarized dataset stand for, as bytes: a symbol can be a part of a character."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, FOLDER_NAME, MODEL_NAME, symbols_in
from mlsm_plugin.core.masking.word_boundaries import (
    BPE_GOES_ON,
    BYTE_LEVEL_BEGIN,
    SENTENCEPIECE_BEGIN,
    WORDPIECE_GOES_ON,
    word_mark,
)
from mlsm_plugin.core.text.hf_tokenizer import SPECIAL_SYMBOLS, HuggingFaceTokenizer

FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")
SEPARATOR = b"\n"  # for a special symbol: ends a character, and is no part of a text


@dataclass(frozen=True)
class SymbolBytes:
    """The bytes of each id of fairseq; :data:`SEPARATOR` for fairseq's special symbols and ``<mask>``, the last id.

    ``adds_space`` says whether a text begins with a space that its tokenizer has added.
    """

    table: list[bytes] = field(repr=False)
    adds_space: bool

    @classmethod
    def of_dataset(cls, folder: PathLike) -> "SymbolBytes":
        """The bytes of the symbols of a dataset, which has its tokenizer beside ``dict.txt``.

        ValueError if there is no tokenizer, ``dict.txt`` was not made from it, or it does not mark words as
        SentencePiece, byte-level BPE, WordPiece or subword-nmt do.
        """
        dictionary = Path(folder, DICTIONARY_NAME)
        if Path(folder, FOLDER_NAME).is_dir():
            tokenizer = HuggingFaceTokenizer(Path(folder, FOLDER_NAME))
            tokenizer.check_dictionary(Path(folder))
            tokens = tokenizer.tokens_by_id()
            pieces = [tokens[number] for number in tokenizer.hf_ids[SPECIAL_SYMBOLS:-1]]
            mark = word_mark(pieces)
            added = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
        elif Path(folder, MODEL_NAME).is_file():
            pieces = [symbol.decode() for symbol in symbols_in(dictionary)]
            mark = SENTENCEPIECE_BEGIN
            added = set()
        else:
            raise ValueError(
                f"{folder} has no tokenizer ({MODEL_NAME} or {FOLDER_NAME}), so its ids cannot be read as text; copy "
                "it there, or binarize the text again"
            )
        special = [SEPARATOR] * SPECIAL_SYMBOLS
        plain = [piece.encode() if piece in added else _bytes_of(piece, mark) for piece in pieces]
        return cls([*special, *plain, SEPARATOR], adds_space=mark in (SENTENCEPIECE_BEGIN, WORDPIECE_GOES_ON))


def _bytes_of(piece: str, mark: str) -> bytes:
    """The bytes of a piece of a vocabulary whose words are marked by ``mark``."""
    if mark == BYTE_LEVEL_BEGIN and _BYTES.keys() >= set(piece):
        return bytes(_BYTES[character] for character in piece)
    if mark == SENTENCEPIECE_BEGIN:
        byte = FALLBACK_BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(SENTENCEPIECE_BEGIN, " ").encode()
    if mark == WORDPIECE_GOES_ON:
        goes_on = len(piece) > 2 and piece.startswith(mark)
        return piece.removeprefix(mark).encode() if goes_on else f" {piece}".encode()
    if mark == BPE_GOES_ON:
        goes_on = len(piece) > 2 and piece.endswith(mark)
        return piece.removesuffix(mark).encode() if goes_on else f"{piece} ".encode()
    return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte for each character of a byte-level BPE: printable ones as they are, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTES = _byte_alphabet()
