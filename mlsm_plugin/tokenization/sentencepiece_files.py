"""The two files of a tokenizer folder: the SentencePiece model and the fairseq dictionary made from it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

import sentencepiece as spm

from mlsm_plugin.files.tokenizer_files import DICTIONARY_NAME, MODEL_NAME
from mlsm_plugin.tokenization.symbol_files import listed_symbols
from mlsm_plugin.tokenization.text_files import PathLike

SPECIAL_PIECES = frozenset({"<unk>", "<s>", "</s>", "<pad>"})  # fairseq's Dictionary adds these itself


def dictionary_pieces(processor: spm.SentencePieceProcessor) -> list[str]:
    """The pieces of ``dict.txt``: the SentencePiece vocabulary in its own order, without the special pieces.

    Raises:
        ValueError: a piece contains whitespace, which fairseq cannot read back, or looks like ``<mask>``, so that
            fairseq would treat ordinary text as a special symbol.
    """
    pieces = [processor.id_to_piece(i) for i in range(len(processor))]
    pieces = [piece for piece in pieces if piece not in SPECIAL_PIECES]
    for piece in pieces:
        if re.search(r"\s", piece):
            raise ValueError(
                f"the piece {piece!r} contains whitespace, which dict.txt cannot hold; train with `mlsm tokenizer`"
            )
        if re.fullmatch(r"<[^<>]+>", piece):
            raise ValueError(f"the piece {piece!r} looks like a special symbol; train with `mlsm tokenizer`")
    return pieces


def dictionary_text(processor: spm.SentencePieceProcessor, counts: Mapping[str, int]) -> str:
    """The content of ``dict.txt``: a line ``piece count`` for every piece; counts are at least 1."""
    lines = io.StringIO()
    for piece in dictionary_pieces(processor):
        lines.write(f"{piece} {max(1, counts.get(piece, 0))}\n")
    return lines.getvalue()


def load_tokenizer(folder: PathLike) -> spm.SentencePieceProcessor:
    """Load the SentencePiece model of a folder and check that ``dict.txt`` was made from it.

    Args:
        folder: the folder that ``mlsm tokenizer --output`` wrote.

    Raises:
        ValueError: a file is missing or damaged, or the two do not belong together.
    """
    model, dictionary = Path(folder, MODEL_NAME), Path(folder, DICTIONARY_NAME)
    for path in (model, dictionary):
        if not path.is_file():
            raise ValueError(f"{path} does not exist; `mlsm tokenizer --output {folder}` makes it")
    processor = spm.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model.read_bytes())
    except RuntimeError:
        raise ValueError(f"{model} is not a SentencePiece model; `mlsm tokenizer --output {folder}` makes it") from None
    if listed_symbols(dictionary) != dictionary_pieces(processor):
        raise ValueError(f"{dictionary} was not made from {model.name} in the same folder; run `mlsm tokenizer` again")
    return processor
