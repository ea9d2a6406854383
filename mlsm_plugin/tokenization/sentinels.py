"""The sentinels of span denoising in the dictionary, as used in training, binarizing and loading."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import numpy as np
from fairseq.data import Dictionary

from mlsm_plugin.tokenization.symbol_files import symbols_of_dataset
from mlsm_plugin.tokenization.word_boundaries import as_rest_of_a_word

DEFAULT_SENTINELS = 100


def sentinel_symbols(number: int) -> list[str]:
    """``<extra_id_0>``, ``<extra_id_1>``, ...: the symbols for the first, second, ... span of a text."""
    return [f"<extra_id_{i}>" for i in range(number)]


def dictionary_with_sentinels(folder: str | os.PathLike[str], number: int) -> tuple[Dictionary, np.ndarray]:
    """The dictionary of a binarized dataset or tokenizer with ``number`` sentinels appended, and their ids.

    Raises:
        FileNotFoundError: the folder has no ``dict.txt``.
    """
    dictionary = symbols_of_dataset(folder)
    return dictionary, np.array([dictionary.add_symbol(symbol, n=0) for symbol in sentinel_symbols(number)])


def encode_with_sentinels(
    text: str, pieces_of: Callable[[str], list[str]], dictionary: Dictionary, num_sentinels: int
) -> list[int]:
    """The ids, without EOS, of a text in which sentinels are written ``<extra_id_0>``.

    Text that follows a sentinel without a space is the rest of a word, or punctuation.

    Args:
        text: one line.
        pieces_of: the tokenizer, from text to pieces.
        dictionary: the dictionary with the sentinels.
        num_sentinels: number of sentinels in the dictionary.

    Raises:
        ValueError: the text has a sentinel that the dictionary lacks, or a sentinel twice.
    """
    ids: list[int] = []
    seen: set[str] = set()
    for number, part in enumerate(re.split(r"(<extra_id_\d+>)", text)):
        if number % 2:
            number_text = part[len("<extra_id_") : -1]
            if number_text != str(int(number_text)) or int(number_text) >= num_sentinels:
                raise ValueError(
                    f"{part} is not one of the {num_sentinels} sentinels; "
                    f"use <extra_id_0> to <extra_id_{num_sentinels - 1}>"
                )
            if part in seen:
                raise ValueError(f"{part} occurs twice; give each gap its own sentinel")
            seen.add(part)
            ids.append(dictionary.index(part))
        elif part.strip():
            pieces = pieces_of(part.strip())
            if number and not part[0].isspace():
                pieces = as_rest_of_a_word(pieces, dictionary)
            ids += [dictionary.index(piece) for piece in pieces]
    return ids
