"""Where the tokens of one tokenizer are among those of another one that reads the same text.

A token belongs to the last token of the other tokenizer that shares a character with it: in an encoder, all tokens of a
word attend to each other, so the last one represents the word.
"""

import sys
from functools import cache

import numpy as np

Offsets = list[tuple[int, int]] | np.ndarray  # where each token starts and ends in a text, in characters, (T, 2)
MOST_WITHOUT_PLACE = 0.1  # of the tokens; a larger share means that the tokenizers read different texts


def places_of(offsets: Offsets, other_offsets: Offsets, text: str) -> np.ndarray:
    """For each token, the index ``(T,)`` of the last token of the other tokenizer that shares a character; -1: none.

    White space is ignored: tokenizers disagree on whether the space before a word belongs to it.
    """
    begins, ends = visible_spans(offsets, text)
    other_begins, other_ends = visible_spans(other_offsets, text)
    visible = np.flatnonzero(other_begins < other_ends)
    # sort, since a tokenizer may change the order of characters, such as accents
    visible = visible[np.argsort(other_begins[visible], kind="stable")]
    before_end = np.searchsorted(other_begins[visible], ends, side="left") - 1
    candidates = visible[np.maximum(before_end, 0)] if len(visible) else np.zeros(len(begins), np.int64)
    shares = (before_end >= 0) & (begins < ends)
    if len(visible):
        shares &= other_ends[candidates] > begins
    return np.where(shares, candidates, -1)


def visible_spans(offsets: Offsets, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Where tokens start and end, ``(T,)`` each, without white space around them; equal for a token of white space."""
    begins, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    characters = np.arange(len(text) + 1)
    is_space = _is_space()[code_points(text)]
    next_visible = np.minimum.accumulate(np.append(np.where(is_space, len(text), characters[:-1]), len(text))[::-1])
    after_visible = np.maximum.accumulate(np.append(0, np.where(is_space, 0, characters[1:])))
    begins = np.minimum(next_visible[::-1][begins], ends)
    return begins, np.maximum(after_visible[ends], begins)


def code_points(text: str) -> np.ndarray:
    """The number of each character of a text, ``(len(text),)`` uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


@cache
def _is_space() -> np.ndarray:
    """Whether each code point is white space, bool."""
    return np.array([chr(number).isspace() for number in range(sys.maxunicode + 1)])
