"""Find where words begin and end in the pieces of a tokenizer."""

import functools
import logging
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

LONGEST_WORD = 10  # tokens; each token of a longer word, as in text without spaces, counts as a word
# marks of word boundaries in the vocabularies of tokenizers
SENTENCEPIECE_BEGIN = "\u2581"
BYTE_LEVEL_BEGIN = "\u0120"  # GPT-2's BPE
WORDPIECE_GOES_ON = "##"  # before a piece that is not the first of its word
BPE_GOES_ON = "@@"  # after a piece that is not the last of its word (subword-nmt)
MARKS = (SENTENCEPIECE_BEGIN, BYTE_LEVEL_BEGIN, WORDPIECE_GOES_ON, BPE_GOES_ON)
SENTENCE_PUNCTUATION = frozenset(".,;:!?\u2026\u3002\uff0c\uff1b\uff1a\uff01\uff1f")


@dataclass(frozen=True)
class PieceClasses:
    """Properties of each id of a vocabulary, as bool arrays ``(V,)``."""

    special: np.ndarray  # never masked: BOS, EOS, padding, unknown words, masks
    begins_word: np.ndarray  # whatever its neighbours are
    ends_word: np.ndarray
    punctuation: np.ndarray  # has only punctuation characters
    sentence_punctuation: np.ndarray  # and one of them is a full stop, comma or the like

    @classmethod
    def of_vocabulary(cls, pieces: Iterable[str], special: Iterable[int]) -> "PieceClasses":
        """The classes of ``pieces``, in the order of their ids; ``special`` holds ids.

        ValueError if no piece marks words as SentencePiece, byte-level BPE, WordPiece or subword-nmt do.
        """
        pieces = list(pieces)
        is_special = np.zeros(len(pieces), bool)
        is_special[list(special)] = True
        begins_word, ends_word = _marked_words(pieces, is_special)
        bare = [without_marks(piece) for piece in pieces]
        kinds = [{unicodedata.category(char)[0] for char in text} for text in bare]
        punctuation = np.array([kind == {"P"} for kind in kinds], bool)
        sentence = np.array([not SENTENCE_PUNCTUATION.isdisjoint(text) for text in bare], bool)
        return cls(is_special, begins_word, ends_word, punctuation, punctuation & sentence)


def _marked_words(pieces: list[str], special: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each piece begins a word, and whether it ends one, whatever its neighbours: bool ``(V,)`` each."""
    nothing = np.zeros(len(pieces), bool)
    mark = word_mark(pieces)
    has_mark = np.array([_has_mark(piece, mark) for piece in pieces], bool)
    if mark == BYTE_LEVEL_BEGIN:  # unmarked at the start of a text: a piece after a special token begins a word
        return has_mark, special
    if mark == WORDPIECE_GOES_ON:
        return ~has_mark & ~special, nothing
    return (has_mark, nothing) if mark == SENTENCEPIECE_BEGIN else (nothing, ~has_mark)


def word_mark(pieces: Iterable[str]) -> str:
    """The mark of word boundaries that most of the pieces with a mark have.

    A few pieces can look as if they had another mark: \u0120 is also a letter of Maltese. ValueError if none has one.
    """
    marks = [mark for piece in pieces for mark in MARKS if _has_mark(piece, mark)]
    if marks:
        return max(MARKS, key=marks.count)
    raise ValueError(
        f"nothing in the vocabulary marks where words begin or end: {SENTENCEPIECE_BEGIN} or {BYTE_LEVEL_BEGIN} before "
        f"the first piece of a word, {WORDPIECE_GOES_ON} before the others, or {BPE_GOES_ON} after all but the last"
    )


def _has_mark(piece: str, mark: str) -> bool:
    if mark in (SENTENCEPIECE_BEGIN, BYTE_LEVEL_BEGIN):
        return piece.startswith(mark)
    return len(piece) > 2 and (piece.endswith(mark) if mark == BPE_GOES_ON else piece.startswith(mark))


def without_marks(piece: str) -> str:
    """A piece without the mark for the beginning or continuation of its word."""
    for mark in (SENTENCEPIECE_BEGIN, BYTE_LEVEL_BEGIN):
        piece = piece.replace(mark, "")
    if len(piece) > 2:
        piece = piece.removeprefix(WORDPIECE_GOES_ON).removesuffix(BPE_GOES_ON)
    return piece


def word_boundaries(
    tokens: np.ndarray, sequence: np.ndarray, pieces: PieceClasses, *, longest: int = LONGEST_WORD
) -> tuple[np.ndarray, np.ndarray]:
    """Whether each token begins a word, and whether it ends one: bool ``(N,)`` each; special tokens do neither.

    Args:
        tokens, sequence: the concatenated ids of all sequences, and the number of each token's sequence, ``(N,)``.
        pieces: the classes of all ids. If they mark the ends of words, every sequence begins with a new word.
        longest: each token of a word with more tokens than this counts as a word of its own.
    """
    special = pieces.special[tokens]
    first = np.append(True, sequence[1:] != sequence[:-1])
    behind_an_end = np.append(True, pieces.ends_word[tokens[:-1]]) | first if pieces.ends_word.any() else False
    begins = (pieces.begins_word[tokens] | behind_an_end) & ~special
    # punctuation is a word of its own if only punctuation follows it up to the next beginning of a word, or the end
    inner_punctuation = pieces.punctuation[tokens] & ~begins & ~special
    stops = np.flatnonzero(~inner_punctuation | first)
    following = np.searchsorted(stops, np.arange(len(tokens)), side="right")  # for each token, the next stop
    at_end = following == len(stops)
    next_stop = stops[np.where(at_end, 0, following)]
    begins = begins | (inner_punctuation & (at_end | begins[next_stop] | special[next_stop] | first[next_stop]))
    behind_special = np.append(False, special[:-1])
    begins = begins | (in_long_words(begins | special | first | behind_special, longest) & ~special)
    ends = np.append(begins[1:] | special[1:] | first[1:], True) & ~special
    return begins, ends


def in_long_words(begins: np.ndarray, longest: int = LONGEST_WORD) -> np.ndarray:
    """Whether each token is in a word of more than ``longest`` tokens, bool ``(N,)``; warns the first time.

    ``begins``, bool ``(N,)``, says whether each token begins a word; the first token always does.
    """
    word = np.maximum(np.cumsum(begins) - 1, 0)
    in_long: np.ndarray = np.bincount(word)[word] > longest
    if in_long.any() and not current_process().daemon:  # otherwise each loader process would warn again
        _say_once(longest)
    return in_long


@functools.cache
def _say_once(longest: int) -> None:
    logger.warning(
        "the text has words of more than %d tokens, as in languages without spaces between words: each token of such "
        "a word counts as a word",
        longest,
    )


SPAN_MASKS = ("<mask_s>", "<mask_e>")


def added_symbols(task_cfg: Any) -> tuple[str, ...]:
    """The symbols that a task with this configuration adds to the dictionary after ``<mask>``."""
    distinct = str(getattr(task_cfg, "span_mask_symbols", "shared")) == "distinct"
    return SPAN_MASKS if distinct and str(getattr(task_cfg, "span_mode", "single")) == "phrase" else ()
