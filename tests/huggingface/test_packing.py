"""Lines are packed whole where they fit; documents share no sequence; no token is lost or moved."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.huggingface.text_sequences import check_max_length, packed

BEGIN, END = -1, -2
Lines = list[list[int] | None]


def documents_of(lines: Lines) -> list[list[list[int]]]:
    """The lines of each document, without empty ones; documents without a token are left out."""
    documents: list[list[list[int]]] = [[]]
    for line in lines:
        if line is None:
            documents.append([])
        elif line:
            documents[-1].append(line)
    return [document for document in documents if document]


def slow_packing(document: list[list[int]], room: int) -> list[list[int]]:
    """An oracle: one token at a time, with a new piece where a line would not fit as a whole."""
    pieces: list[list[int]] = [[]]
    for line in document:
        if pieces[-1] and len(pieces[-1]) + len(line) > room:
            pieces.append([])
        for token in line:
            if len(pieces[-1]) == room:
                pieces.append([])
            pieces[-1].append(token)
    return pieces


@given(st.lists(st.none() | st.lists(st.integers(0, 99), max_size=23), max_size=12), st.integers(3, 12))
def test_packing_is_that_of_the_oracle(lines: Lines, max_length: int) -> None:
    found = list(packed(lines, max_length=max_length, begin=[BEGIN], end=[END]))
    room = max_length - 2
    wanted = [piece for document in documents_of(lines) for piece in slow_packing(document, room)]
    assert found == [[BEGIN, *piece, END] for piece in wanted]
    assert all(3 <= len(sequence) <= max_length for sequence in found)
    assert [token for sequence in found for token in sequence[1:-1]] == [t for line in lines for t in line or ()]


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=10), min_size=1, max_size=12))
def test_lines_that_fit_are_whole_and_sequences_are_as_full_as_can_be(lines: list[list[int]]) -> None:
    sequences = [sequence[1:-1] for sequence in packed(lines, max_length=12, begin=[BEGIN], end=[END])]
    starts = [0, *accumulate(map(len, lines))]
    firsts = [0, *accumulate(map(len, sequences))]
    assert set(firsts) <= set(starts)
    for number, first in enumerate(firsts[1:-1]):
        following = lines[starts.index(first)]
        assert len(sequences[number]) + len(following) > 10


@pytest.mark.parametrize("length", [-1, 0, 2])
def test_a_length_without_room_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="--max-length must be at least 3"):
        check_max_length(length)
    with pytest.raises(ValueError, match="--max-length must be at least 3"):
        list(packed([], max_length=length, begin=[BEGIN], end=[END]))


def test_a_long_line_is_cut_in_linear_time() -> None:
    line = list(range(2_000_000))
    sequences = list(packed([line, [7]], max_length=12, begin=[BEGIN], end=[END]))
    assert len(sequences) == 200_001
    assert sequences[-1] == [BEGIN, 7, END]
