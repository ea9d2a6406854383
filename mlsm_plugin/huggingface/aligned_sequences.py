"""Alignment of two tokenizers of the same text, so that a model can learn codes of a model with another vocabulary.

A token takes the code of the last token of the other tokenizer that shares a character with it: in an encoder, all
tokens of a word attend to each other, so the last one represents the word. Both tokenizers read the same lines, and
give for each token the characters of the line that it stands for.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import NamedTuple

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.text_files import read_text
from mlsm_plugin.core.text.token_places import MOST_WITHOUT_PLACE, places_of
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens
from mlsm_plugin.huggingface.text_sequences import LINES_AT_ONCE
from mlsm_plugin.huggingface.token_sequences import TokenSequences

ANOTHER_AUXILIARY = "use an auxiliary model that knows such text, or raise --max-unk-rate"
OTHER_TEXT = (
    "the sequences are not those of this text with this tokenizer: align them with the text that they were made from, "
    "all of them"
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AlignedSequences:
    """Sequences of a second tokenizer, one for each sequence of the first, with the places of the first's tokens.

    For each token of the first, ``places`` has 1 + the place of the aligned token in the second's sequence; 0: none.
    """

    sequences: TokenSequences
    places: TokenSequences

    def part(self, first: int, last: int) -> "AlignedSequences":
        """The aligned sequences from ``first`` up to, not including, ``last``."""
        return AlignedSequences(self.sequences.part(first, last), self.places.part(first, last))

    def check_aligned_with(self, sequences: TokenSequences) -> None:
        """Raise ValueError unless there is a place for each token of ``sequences``, and no more."""
        lengths = np.diff(sequences.starts)
        same_number = len(self.sequences) == len(self.places) == len(lengths)
        if not same_number or not np.array_equal(np.diff(self.places.starts), lengths):
            raise ValueError(
                "the aligned text belongs to other sequences, or to another part of them; align these sequences, or "
                "take the same part of both"
            )

    def positions_of(self, index: int) -> np.ndarray:
        """Positions ``(T,)`` in the corpus of the second tokenizer, int64, for the tokens of a sequence; -1: none."""
        places = self.places[index]
        positions: np.ndarray = np.where(places > 0, self.sequences.starts[index] + places - 1, -1)
        return positions


class _Line(NamedTuple):
    """A line as both tokenizers read it."""

    ids: list[int]
    auxiliary_ids: list[int]
    places: np.ndarray  # of the first tokenizer's tokens in auxiliary_ids


@dataclass
class _Counts:
    """Counts for the checks and warnings at the end."""

    tokens: int = 0
    without_place: int = 0
    cut: int = 0
    example: str = ""


def write_aligned(
    texts: Sequence[PathLike],
    sequences: TokenSequences,
    tokenizer: HuggingFaceTokenizer,
    auxiliary_tokenizer: HuggingFaceTokenizer,
    output: PathLike,
    places: PathLike,
    *,
    max_length: int,
    max_unk_rate: float,
) -> AlignedSequences:
    """Write the text of ``sequences`` in the tokens of an auxiliary model, and the place of each token among them.

    Args:
        texts, tokenizer: the input from which ``write_text_sequences`` made ``sequences``; each sequence is whole
            lines, or part of a line that is too long.
        auxiliary_tokenizer: the tokenizer of the auxiliary model.
        output, places: folders for its sequences, and for the places; each is written atomically.
        max_length: longest sequence that its model takes; longer sequences are cut, and the rest has no place.
        max_unk_rate: largest share of the text that may be unknown to it.

    Raises:
        ValueError: the sequences are not those of the text, too much of the text is unknown, or more than a tenth of
            the tokens have no place: the tokenizers read different texts.
    """
    unknown = UnknownTokens()
    counts = _Counts()
    about: dict[str, object] = {"tokenizer": auxiliary_tokenizer.vocabulary_fingerprint, "max_unk_rate": max_unk_rate}

    def checked() -> Iterator[list[int]]:
        for ids, _ in _aligned(texts, sequences, tokenizer, auxiliary_tokenizer, max_length, unknown, counts):
            yield ids
        unknown.check("the text for the auxiliary model", max_unk_rate, remedy=ANOTHER_AUXILIARY)
        if counts.without_place > MOST_WITHOUT_PLACE * counts.tokens:
            raise ValueError(
                f"{counts.without_place:,} of {counts.tokens:,} tokens have no token of the auxiliary model at their "
                f"characters, such as in {counts.example!r}: the two tokenizers read this text differently; use an "
                "auxiliary model for such text"
            )

    auxiliary_sequences = TokenSequences.write(output, checked(), about=about)
    pairs = _aligned(texts, sequences, tokenizer, auxiliary_tokenizer, max_length, UnknownTokens(), _Counts())
    aligned = AlignedSequences(auxiliary_sequences, TokenSequences.write(places, (row for _, row in pairs)))
    if counts.cut:
        logger.warning(
            "%d of %d sequences are longer than %d tokens of the auxiliary model; tokens after them are never masked",
            counts.cut,
            len(sequences),
            max_length,
        )
    return aligned


def _aligned(
    texts: Sequence[PathLike],
    sequences: TokenSequences,
    tokenizer: HuggingFaceTokenizer,
    auxiliary_tokenizer: HuggingFaceTokenizer,
    max_length: int,
    unknown: UnknownTokens,
    counts: _Counts,
) -> Iterator[tuple[list[int], np.ndarray]]:
    """For each sequence, its auxiliary ids; and for each of its tokens, 1 + its place among them, or 0."""
    room = max_length - len(auxiliary_tokenizer.surrounded([]))
    lines = _lines(texts, tokenizer, auxiliary_tokenizer, unknown, counts)
    line = _Line([], [], np.zeros(0, np.int64))
    first = 0  # tokens of the line that are already in a sequence
    auxiliary_first = 0
    for index in range(len(sequences)):
        sequence = sequences[index].tolist()
        remaining = len(sequence) - len(tokenizer.surrounded([]))
        ids: list[int] = []
        auxiliary_ids: list[int] = []
        rows = [np.zeros(len(tokenizer.before), np.int64)]
        while remaining:
            if first == len(line.places):
                next_line = next(lines, None)
                if next_line is None:
                    raise ValueError(OTHER_TEXT)
                line = next_line
                first = 0
                auxiliary_first = 0
            places = line.places[first : first + remaining]
            ids += line.ids[first : first + remaining]
            first += len(places)
            remaining -= len(places)
            is_whole = first == len(line.places)
            last = len(line.auxiliary_ids) if is_whole else max(auxiliary_first, int(places.max(initial=-1)) + 1)
            # a token of the auxiliary tokenizer that spans two sequences goes into the first
            shifted = places - auxiliary_first + len(auxiliary_ids) + len(auxiliary_tokenizer.before) + 1
            rows.append(np.where(places >= auxiliary_first, shifted, 0))
            auxiliary_ids += line.auxiliary_ids[auxiliary_first:last]
            auxiliary_first = last
        if tokenizer.surrounded(ids) != sequence:
            raise ValueError(OTHER_TEXT)
        rows.append(np.zeros(len(tokenizer.after), np.int64))
        row = np.concatenate(rows)
        if len(auxiliary_ids) > room:
            counts.cut += 1
            row[row > room + len(auxiliary_tokenizer.before)] = 0
        yield auxiliary_tokenizer.surrounded(auxiliary_ids[:room]), row
    if next(lines, None) is not None:
        raise ValueError(OTHER_TEXT)


def _lines(
    texts: Sequence[PathLike],
    tokenizer: HuggingFaceTokenizer,
    auxiliary_tokenizer: HuggingFaceTokenizer,
    unknown: UnknownTokens,
    counts: _Counts,
) -> Iterator[_Line]:
    """The lines with tokens, read in the same way as by :func:`.ids_of_lines`.

    No token is aligned with an unknown token of the auxiliary tokenizer, whose code says nothing about the text.
    """
    spaced = (f" {line}" if line and before else line for before, line in pairwise(chain([""], read_text(texts))))
    visible = (line for line in spaced if line)
    while batch := list(islice(visible, LINES_AT_ONCE)):
        for text, (ids, offsets), (auxiliary_ids, auxiliary_offsets) in zip(
            batch, tokenizer.encoded(batch), auxiliary_tokenizer.encoded(batch), strict=True
        ):
            if not ids:
                continue
            unknown.add(text, auxiliary_ids, auxiliary_offsets, auxiliary_tokenizer.unknown_id)
            places = places_of(offsets, auxiliary_offsets, text)
            counts.tokens += len(places)
            pieces = (text[slice(*offsets[number])] for number in np.flatnonzero(places < 0))
            num_without_place = sum(not piece.isspace() for piece in pieces)  # white space alone never has a place
            counts.without_place += num_without_place
            if num_without_place and not counts.example:
                counts.example = text[:80]
            unknown_id = auxiliary_tokenizer.unknown_id
            is_known = np.array([*auxiliary_ids, unknown_id]) != unknown_id  # place -1 is the appended entry
            yield _Line(ids, auxiliary_ids, np.where(is_known[places], places, -1))
