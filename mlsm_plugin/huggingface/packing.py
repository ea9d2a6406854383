"""Packs the ids of lines into sequences of bounded length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

FEWEST = 3  # a token, and those that begin and end a sequence


def check_max_length(max_length: int) -> None:
    """Raise ValueError if ``max_length`` leaves no room for a token between the two that surround a sequence."""
    if max_length < FEWEST:
        raise ValueError(f"--max-length must be at least {FEWEST}: two special tokens and one of the text")


def packed(lines: Iterable[Sequence[int] | None], *, max_length: int, begin: int, end: int) -> Iterator[list[int]]:
    """Sequences of whole lines, as many as fit, each between ``begin`` and ``end``.

    A line that does not fit begins a new sequence. One that is longer than a sequence is cut; what follows it is packed
    with its last piece.

    Args:
        lines: the ids of each line; None between two documents, which share no sequence.
        max_length: longest sequence, ``begin`` and ``end`` included.
        begin, end: ids around each sequence.

    Raises:
        ValueError: ``max_length`` leaves no room for a token.
    """
    check_max_length(max_length)
    room = max_length - 2
    current: list[int] = []
    for line in lines:
        if current and (line is None or len(current) + len(line) > room):
            yield [begin, *current, end]
            current = []
        if not line:
            continue
        cut = max(0, (len(line) - 1) // room * room)  # where the last piece of a long line begins
        for first in range(0, cut, room):
            yield [begin, *line[first : first + room], end]
        current.extend(line[cut:])
    if current:
        yield [begin, *current, end]
