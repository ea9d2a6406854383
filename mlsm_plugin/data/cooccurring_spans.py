"""Spans whose words occur elsewhere in a group of sequences: what NPM masks (Min et al., 2022)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# marks of words in the vocabularies of tokenizers
SENTENCEPIECE_BEGIN = "\u2581"
BYTE_LEVEL_BEGIN = "\u0120"  # GPT-2's BPE
WORDPIECE_GOES_ON = "##"  # before a piece that is not the first of its word
BPE_GOES_ON = "@@"  # behind a piece that is not the last of its word (subword-nmt)
SENTENCE_PUNCTUATION = frozenset(".,;:!?\u2026\u3002\uff0c\uff1b\uff1a\uff01\uff1f")


@dataclass(frozen=True)
class PieceClasses:
    """What is known of each id of a vocabulary, as bool arrays ``(V,)``.

    Attributes:
        special: never masked (BOS, EOS, padding, unknown words, masks).
        begins_word: begins a word, whatever comes before it.
        ends_word: ends a word, whatever follows it.
        punctuation: punctuation characters only.
        sentence_punctuation: so, and a full stop, comma or the like among them.
    """

    special: np.ndarray
    begins_word: np.ndarray
    ends_word: np.ndarray
    punctuation: np.ndarray
    sentence_punctuation: np.ndarray

    @classmethod
    def of_vocabulary(cls, pieces: Iterable[str], special: Iterable[int]) -> PieceClasses:
        """The classes of ``pieces``, in the order of their ids; ``special`` are ids.

        Raises:
            ValueError: nothing marks words as SentencePiece, byte-level BPE, WordPiece or subword-nmt do.
        """
        pieces = list(pieces)
        is_special = np.zeros(len(pieces), bool)
        is_special[list(special)] = True
        begins_word, ends_word = _marked_words(pieces, is_special)
        bare = [_without_marks(piece) for piece in pieces]
        punctuation = np.array([bool(text) and all(_is_punctuation(char) for char in text) for text in bare], bool)
        sentence = np.array([not SENTENCE_PUNCTUATION.isdisjoint(text) for text in bare], bool)
        return cls(is_special, begins_word, ends_word, punctuation, punctuation & sentence)


def _marked_words(pieces: list[str], special: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which pieces begin words and which end words, whatever is beside them, each bool ``(V,)``."""
    nothing = np.zeros(len(pieces), bool)
    for mark in (SENTENCEPIECE_BEGIN, BYTE_LEVEL_BEGIN):
        begins = np.array([piece.startswith(mark) for piece in pieces], bool)
        if begins.any():
            # byte-level BPE does not mark the first word of a text: what follows a special token begins one
            return begins, special if mark == BYTE_LEVEL_BEGIN else nothing
    goes_on = np.array([piece.startswith(WORDPIECE_GOES_ON) and len(piece) > 2 for piece in pieces], bool)
    if goes_on.any():
        return ~goes_on & ~special, nothing
    goes_on = np.array([piece.endswith(BPE_GOES_ON) and len(piece) > 2 for piece in pieces], bool)
    if goes_on.any():
        return nothing, ~goes_on
    raise ValueError(
        f"nothing in the vocabulary marks where words begin or end: {SENTENCEPIECE_BEGIN} or {BYTE_LEVEL_BEGIN} before "
        f"the first piece of a word, {WORDPIECE_GOES_ON} before the others, or {BPE_GOES_ON} behind all but the last"
    )


def _without_marks(piece: str) -> str:
    for mark in (SENTENCEPIECE_BEGIN, BYTE_LEVEL_BEGIN):
        piece = piece.replace(mark, "")
    if len(piece) > 2:
        piece = piece.removeprefix(WORDPIECE_GOES_ON).removesuffix(BPE_GOES_ON)
    return piece


@dataclass(frozen=True)
class SpanRules:
    """Which spans are drawn.

    Attributes:
        mask_prob: share of the group's tokens to mask.
        length_p: lengths are geometric with this probability: 1 with p, 2 with p (1 - p), ...
        max_length: longer ones are cut to it.
        punctuation_prob: with which a single punctuation token may be masked.
        max_ngram_masks: times that one n-gram is masked in a group.
        max_spans_per_sequence: spans of a sequence.
    """

    mask_prob: float = 0.15
    length_p: float = 0.5
    max_length: int = 10
    punctuation_prob: float = 0.1
    max_ngram_masks: int = 10
    max_spans_per_sequence: int = 64

    def __post_init__(self) -> None:
        for name in ("mask_prob", "length_p"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if not 0 <= self.punctuation_prob <= 1:
            raise ValueError(f"punctuation_prob must be in [0, 1], got {self.punctuation_prob}")
        for name in ("max_length", "max_ngram_masks", "max_spans_per_sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def sample_spans(
    sequences: Sequence[np.ndarray], *, pieces: PieceClasses, rules: SpanRules, rng: np.random.Generator
) -> list[tuple[int, int, int]]:
    """Spans to mask in a group of sequences, each of which occurs in another sequence of the group too.

    A span begins at the beginning of a word and ends at the end of one, and holds no special token. Punctuation at the
    end of a word ("end" + ".") is a word of its own. A length is drawn, then a span of it uniformly from those that are
    left; where none is, one of the next shorter length. Spans do not overlap, a span of several tokens does not begin
    with sentence punctuation, and :class:`SpanRules` says the rest. All spans together hold at most ``mask_prob`` of
    the tokens that are not special.

    Args:
        sequences: ids, ``(T_i,)`` each.
        pieces: the classes of all ids.
        rules: how much is masked.
        rng: source of randomness.

    Returns:
        (sequence, start, length), in order.

    Reference:
        Min et al., "Nonparametric Masked Language Modeling", 2022, section 3.2.
    """
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    if lengths.sum() == 0:
        return []
    text = _Text.of(np.concatenate([np.asarray(sequence) for sequence in sequences]), lengths, pieces)
    budget = round(rules.mask_prob * int((~text.special).sum()))
    queues = [
        _Queue.of(ngrams, length, text, pieces, rules, rng)
        for length, ngrams in enumerate(_repeated_ngrams(text, rules.max_length), start=1)
    ]
    chosen = _choose(queues, text, budget, rules, rng)
    first = np.cumsum(lengths) - lengths
    return [
        (sequence, start - int(first[sequence]), length)
        for start, length in sorted(chosen)
        for sequence in (int(text.sequence[start]),)
    ]


@dataclass(frozen=True)
class _Text:
    """All tokens of a group in a row."""

    tokens: np.ndarray
    sequence: np.ndarray
    special: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    vocabulary: int

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray, pieces: PieceClasses) -> _Text:
        tokens = tokens.astype(np.int64)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        special = pieces.special[tokens]
        begins, ends = word_boundaries(tokens, sequence, pieces)
        return cls(tokens, sequence, special, begins, ends, len(pieces.special))


def word_boundaries(tokens: np.ndarray, sequence: np.ndarray, pieces: PieceClasses) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens begin a word and which end one, as bool arrays ``(N,)``; special tokens do neither.

    Args:
        tokens: ids ``(N,)`` of all sequences in a row.
        sequence: which sequence each belongs to, ``(N,)``.
        pieces: the classes of all ids. Where they tell how words end, a sequence begins with the beginning of one.
    """
    special = pieces.special[tokens]
    first = np.append(True, sequence[1:] != sequence[:-1])
    behind_an_end = np.append(True, pieces.ends_word[tokens[:-1]]) | first if pieces.ends_word.any() else False
    begins = (pieces.begins_word[tokens] | behind_an_end) & ~special
    # punctuation that only punctuation separates from the next beginning of a word, or from the end, is a word
    inner_punctuation = pieces.punctuation[tokens] & ~begins & ~special
    stops = np.flatnonzero(~inner_punctuation | first)
    following = np.searchsorted(stops, np.arange(len(tokens)), side="right")  # of each token, the next stop
    at_end = following == len(stops)
    next_stop = stops[np.where(at_end, 0, following)]
    begins = begins | (inner_punctuation & (at_end | begins[next_stop] | special[next_stop] | first[next_stop]))
    ends = np.append(begins[1:] | special[1:] | first[1:], True) & ~special
    return begins, ends


def _repeated_ngrams(text: _Text, max_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For n = 1, 2, ...: beginnings and n-gram numbers of the n-grams that are in several sequences.

    An n-gram is repeated only where its first n - 1 tokens are: the numbers of those and the next token are its key.
    """
    starts = np.flatnonzero(text.begins)
    keys = text.tokens[starts]
    for length in range(1, max_length + 1):
        if len(starts) == 0:
            return
        order = np.argsort(keys, kind="stable")
        keys, starts = keys[order], starts[order]
        is_first = np.append(True, keys[1:] != keys[:-1])
        number = np.cumsum(is_first) - 1
        firsts = np.flatnonzero(is_first)
        sequence = text.sequence[starts]  # ascending within an n-gram, since the sort is stable
        lasts = np.append(firsts[1:], len(starts)) - 1
        in_several = (sequence[firsts] != sequence[lasts])[number]
        starts, number = starts[in_several], number[in_several]
        at_word_end = text.ends[starts + length - 1]
        yield starts[at_word_end], number[at_word_end]
        goes_on = starts + length < len(text.tokens)
        starts, number = starts[goes_on], number[goes_on]
        goes_on = (text.sequence[starts + length] == text.sequence[starts]) & ~text.special[starts + length]
        starts, number = starts[goes_on], number[goes_on]
        keys = number * text.vocabulary + text.tokens[starts + length]
        order = np.argsort(starts, kind="stable")
        starts, keys = starts[order], keys[order]


@dataclass
class _Queue:
    """The spans of one length that have not been looked at, in random order from the end."""

    length: int
    starts: list[int]
    numbers: list[int]
    masks: dict[int, int]

    @classmethod
    def of(
        cls,
        ngrams: tuple[np.ndarray, np.ndarray],
        length: int,
        text: _Text,
        pieces: PieceClasses,
        rules: SpanRules,
        rng: np.random.Generator,
    ) -> _Queue:
        starts, numbers = ngrams
        order = rng.permutation(len(starts))
        starts, numbers = starts[order], numbers[order]
        if length == 1:
            kept = ~pieces.punctuation[text.tokens[starts]] | (rng.random(len(starts)) < rules.punctuation_prob)
        else:
            kept = ~pieces.sentence_punctuation[text.tokens[starts]]
        return cls(length, starts[kept].tolist(), numbers[kept].tolist(), {})


def _choose(
    queues: list[_Queue], text: _Text, budget: int, rules: SpanRules, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """(start, length) of spans that keep to the rules; what cannot be taken once never can, and is thrown away."""
    chosen: list[tuple[int, int]] = []
    covered = bytearray(len(text.tokens))
    spans_of = [0] * (int(text.sequence[-1]) + 1)
    sequence = text.sequence

    def take(queue: _Queue) -> bool:
        length = queue.length
        while queue.starts:
            start, number = queue.starts.pop(), queue.numbers.pop()
            masks, own = queue.masks.get(number, 0), int(sequence[start])
            if masks == rules.max_ngram_masks or spans_of[own] == rules.max_spans_per_sequence:
                continue
            if covered.find(1, start, start + length) >= 0:
                continue
            queue.masks[number] = masks + 1
            spans_of[own] += 1
            covered[start : start + length] = b"\1" * length
            chosen.append((start, length))
            return True
        return False

    shortest = 0  # all queues of lengths up to it are used up
    while budget > 0:
        # a geometric length above `shortest`, given that it is above it, is again geometric
        while shortest < len(queues) and not queues[shortest].starts:
            shortest += 1
        if shortest >= min(len(queues), budget):
            break
        drawn = min(shortest + int(rng.geometric(rules.length_p)), rules.max_length, len(queues), budget)
        for length in range(drawn, shortest, -1):
            if take(queues[length - 1]):
                budget -= length
                break
    return chosen


def _is_punctuation(char: str) -> bool:
    return unicodedata.category(char)[0] == "P"
