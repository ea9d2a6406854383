"""Encode texts in which ``<mask>``, or a sentinel of span denoising, stands for missing words."""

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from fairseq.data import Dictionary

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.text.infilled_text import sentinel_symbols, sentinels_in
from mlsm_plugin.core.text.text_files import check_text
from mlsm_plugin.fairseq_plugin.text.symbol_files import symbols_of_dataset
from mlsm_plugin.fairseq_plugin.text.text_tokenizer import HuggingFaceBPE

MASK = "<mask>"
GUARD = "\ufdd0"  # a code point that is not a character, so no text has it and no piece spans it


class Bpe(Protocol):
    """A tokenizer of fairseq: text to pieces separated by spaces."""

    def encode(self, text: str, /) -> str: ...


def ids_between_masks(text: str, bpe: Bpe, dictionary: Dictionary) -> list[list[int]]:
    """The ids of the parts of a text before, between and after its ``<mask>``.

    Spaces before a mask are ignored. Text that follows a mask without a space is the rest of a word, or punctuation.
    All parts have the same ids as in a text without masks. ``bpe.encode(text)`` returns pieces separated by spaces, as
    in fairseq; pieces that are not in the dictionary are unknown. ValueError as for :func:`.check_text`.
    """
    check_text(text)
    parts = text.split(MASK)
    parts = [*(part.rstrip() for part in parts[:-1]), parts[-1]]
    pieces_of_parts = [bpe.encode(parts[0]).split(), *(pieces_after_a_gap(part, bpe) for part in parts[1:])]
    return [[dictionary.index(piece) for piece in pieces] for pieces in pieces_of_parts]


def pieces_after_a_gap(text: str, bpe: Bpe) -> list[str]:
    """The pieces of a text that follows a mask or a sentinel."""
    if isinstance(bpe, HuggingFaceBPE):
        return bpe.encode_after_a_gap(text).split()
    pieces = bpe.encode(GUARD + text).split()
    place = next((number for number, piece in enumerate(pieces) if GUARD in piece), None)
    if place is None:  # a tokenizer that does not write pieces as text, such as GPT-2's
        return list(bpe.encode(text).split())
    rest = pieces[place].partition(GUARD)[2]  # unknown characters are one piece with it
    return ([rest] if rest else []) + pieces[place + 1 :]


def encode_masked_text(
    text: str, bpe: Bpe, dictionary: Dictionary, *, masks: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The ids ``(T,)`` of a text, with BOS and EOS, and for each ``<mask>`` the position of its first id.

    One or more ids ``masks`` replace each ``<mask>``; other ids are those of :func:`ids_between_masks`.
    """
    first, *parts_after_masks = ids_between_masks(text, bpe, dictionary)
    ids = [dictionary.bos(), *first]
    places = []
    for part in parts_after_masks:
        places.append(len(ids))
        ids += [*masks, *part]
    return [*ids, dictionary.eos()], places


def cut_around_masks(ids: list[int], places: list[int], *, length: int, limit: int) -> tuple[list[int], list[int]]:
    """Cut off the ends of a text that is longer than ``limit`` ids; BOS, EOS and the masks stay.

    ``ids`` and ``places`` come from :func:`encode_masked_text`, with at least one mask, each of ``length`` ids.
    ValueError if the masks are too far apart.
    """
    if len(ids) <= limit:
        return ids, places
    first = places[0]
    last = places[-1] + length
    room = limit - 2 - (last - first)
    if room < 0:
        raise ValueError(
            f"the masks are {last - first} tokens apart, but the model has {limit} positions: use fewer masks"
        )
    begin = max(1, min(first - room // 2, len(ids) - 1 - (limit - 2)))
    return [ids[0], *ids[begin : begin + limit - 2], ids[-1]], [place - begin + 1 for place in places]


DEFAULT_SENTINELS = 100


def dictionary_with_sentinels(folder: PathLike, number: int) -> tuple[Dictionary, np.ndarray]:
    """The dictionary of a binarized dataset or tokenizer with ``number`` sentinels appended, and their ids.

    FileNotFoundError if the folder has no ``dict.txt``.
    """
    dictionary = symbols_of_dataset(folder)
    return dictionary, np.array([dictionary.add_symbol(symbol, n=0) for symbol in sentinel_symbols(number)])


def encode_with_sentinels(text: str, bpe: Bpe, dictionary: Dictionary, num_sentinels: int) -> list[int]:
    """The ids, without EOS, of a line with sentinels, written ``<extra_id_0>``; ``bpe`` is the tokenizer.

    Text that follows a sentinel without a space is the rest of a word, or punctuation. ValueError if a sentinel is not
    among the ``num_sentinels`` of the dictionary or occurs twice, or as for :func:`.check_text`.
    """
    ids: list[int] = []
    check_text(text)
    sentinels_in(text, num_sentinels)  # raises the error
    for number, part in enumerate(re.split(r"(<extra_id_\d+>)", text)):
        if number % 2:
            ids.append(dictionary.index(part))
        elif part.strip():
            pieces = pieces_after_a_gap(part.rstrip(), bpe) if number else bpe.encode(part.strip()).split()
            ids += [dictionary.index(piece) for piece in pieces]
    return ids
