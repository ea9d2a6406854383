"""Where words begin and end, found one token at a time."""

from __future__ import annotations

import numpy as np

from mlsm_plugin.core.masking.word_boundaries import LONGEST_WORD, PieceClasses


def slow_boundaries(
    tokens: np.ndarray, pieces: PieceClasses, longest: int = LONGEST_WORD
) -> tuple[list[bool], list[bool]]:
    """Of one sequence, from the right: punctuation before a beginning, a special token or the end is a word.

    Then the tokens of each word, or rest of a word, that is longer than ``longest`` become words.
    """
    begins = [False] * len(tokens)
    following_starts = True
    for place in reversed(range(len(tokens))):
        token = tokens[place]
        if pieces.special[token]:
            following_starts = True
            continue
        behind_an_end = pieces.ends_word.any() and (place == 0 or pieces.ends_word[tokens[place - 1]])
        begins[place] = bool(
            pieces.begins_word[token] or behind_an_end or (pieces.punctuation[token] and following_starts)
        )
        following_starts = begins[place]
    word: list[int] = []
    for place, token in enumerate(tokens):
        if begins[place] or pieces.special[token]:
            word = []
        if not pieces.special[token]:
            word.append(place)
        goes_on = place + 1 < len(tokens) and not begins[place + 1] and not pieces.special[tokens[place + 1]]
        if len(word) > longest and not goes_on:
            for part in word:
                begins[part] = True
    ends = [
        not pieces.special[tokens[place]]
        and (place + 1 == len(tokens) or begins[place + 1] or bool(pieces.special[tokens[place + 1]]))
        for place in range(len(tokens))
    ]
    return begins, ends
