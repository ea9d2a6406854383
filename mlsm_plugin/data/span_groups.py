"""Groups of sequences whose common spans are masked, and their batches (Min et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.tokenization.word_boundaries import PieceClasses, word_boundaries


@dataclass(frozen=True)
class SpanRules:
    """The rules by which spans are drawn.

    Attributes:
        mask_prob: share of the group's tokens to mask.
        length_p: parameter p of the geometric distribution of lengths: 1 with probability p, 2 with p (1 - p), ...
        max_length: maximum length; a longer draw counts as this length.
        punctuation_prob: probability that a single punctuation token may be masked.
        max_ngram_masks: maximum number of times that one n-gram is masked in a group.
        max_spans_per_sequence: maximum number of spans of a sequence.

    Raises:
        ValueError: a value is out of range.
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
    """Draw the spans to mask in a group of sequences; each also occurs in another sequence of the group.

    A span begins where a word begins, ends where a word ends, and contains no special token. Punctuation at the end of
    a word ("end" + ".") is a word of its own, and so is each token of a word that is longer than a span may be. First a
    length is drawn, then a span uniformly from the remaining spans of this length; if there is none, from those of the
    next shorter length. Spans do not overlap, and a span of several tokens does not begin with sentence punctuation.
    :class:`SpanRules` defines the rest. All spans together hold at most ``mask_prob`` of the tokens that are not
    special.

    Args:
        sequences: ids of each sequence, ``(T_i,)``.
        pieces: the classes of all ids.
        rules: the rules by which spans are drawn.
        rng: source of randomness.

    Returns:
        a list of (sequence, start, length), in order.

    Reference:
        Min et al., "Nonparametric Masked Language Modeling", 2022, section 3.2.
    """
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    if lengths.sum() == 0:
        return []
    tokens = np.concatenate([np.asarray(sequence) for sequence in sequences])
    text = _Text.of(tokens, lengths, pieces, longest_word=rules.max_length)
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
    """All tokens of a group, concatenated."""

    tokens: np.ndarray
    sequence: np.ndarray
    special: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    vocabulary: int

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray, pieces: PieceClasses, *, longest_word: int) -> _Text:
        tokens = tokens.astype(np.int64)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        special = pieces.special[tokens]
        begins, ends = word_boundaries(tokens, sequence, pieces, longest=longest_word)
        return cls(tokens, sequence, special, begins, ends, len(pieces.special))


def _repeated_ngrams(text: _Text, max_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For n = 1, 2, ...: the starts and the numbers of the n-grams that occur in several sequences.

    An n-gram can only be repeated if its first n - 1 tokens are: the number of those and its last token are its key.
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
    """The spans of one length that have not been tried; they are taken from the end, in random order."""

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
    """(start, length) of spans that follow the rules. A span that cannot be taken now never can, and is dropped."""
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

    shortest = 0  # the queues of all lengths up to this one are empty
    while budget > 0:
        # a geometric length, given that it is above `shortest`, exceeds it by a geometric length again
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


@dataclass(frozen=True)
class SpanMasking:
    """How spans are drawn and written.

    Attributes:
        pieces: the classes of all ids.
        rules: the rules by which spans are drawn.
        start_mask, end_mask: the two ids that replace a span.
        pad: the padding id.
        seed: decides the spans of a group, together with the epoch and the number of the group.
        single: mask and retrieve each token of a span separately; one ``start_mask`` replaces it.
        max_length: maximum length of a masked sequence. A span of one token becomes two masks; such spans are dropped
            if the sequence gets too long.
        context_masking_ratio: probability that the keys of a batch come from the masked sequences.
    """

    pieces: PieceClasses
    rules: SpanRules
    start_mask: int
    end_mask: int
    pad: int
    seed: int
    single: bool = False
    max_length: int | None = None
    context_masking_ratio: float = 0.0


def draw_spans(sequences: Sequence[np.ndarray], masking: SpanMasking, *, epoch: int, index: int) -> dict[str, Any]:
    """A group with its masked spans, which depend only on the seed, the epoch and the number of the group.

    Args:
        sequences: ids of each sequence ``(T_i,)``.
        masking: how spans are drawn.
        epoch, index: the epoch, and the number of the group.

    Returns:
        what :func:`collate_groups` reads.
    """
    rng = np.random.default_rng([masking.seed, epoch, index])
    spans = sample_spans(sequences, pieces=masking.pieces, rules=masking.rules, rng=rng)
    if masking.single:
        spans = [(sequence, start + i, 1) for sequence, start, length in spans for i in range(length)]
    return {
        "id": index,
        "sequences": sequences,
        "spans": _fitting(spans, sequences, masking),
        "mask_context": bool(rng.random() < masking.context_masking_ratio),
    }


def collate_groups(samples: list[dict[str, Any]], masking: SpanMasking) -> dict[str, Any]:
    """A batch of groups, which :func:`draw_spans` made.

    Returns:
        a dict of ``net_input`` with the masked ``src_tokens`` (S, T') and ``src_lengths`` (S,) of the S sequences
        of all groups; ``context`` with the unmasked ``src_tokens`` (S, T); ``spans``, a dict of (n,) tensors: the
        ``sequence`` of each span, the positions of its masks in the masked sequence (``query_start`` and
        ``query_end``), and its place in the unmasked sequence (``start`` and ``length``); ``mask_context``, whether
        the keys come from the masked sequences; ``id``, ``nsentences``, ``ntokens``, ``num_groups`` and
        ``num_groups_without_spans``.
    """
    masked: list[np.ndarray] = []
    context: list[np.ndarray] = []
    rows: list[tuple[int, int, int, int, int]] = []
    for sample in samples:
        of_sequence: list[list[tuple[int, int]]] = [[] for _ in sample["sequences"]]
        for sequence, start, length in sample["spans"]:
            of_sequence[sequence].append((start, length))
        for tokens, spans in zip(sample["sequences"], of_sequence, strict=True):
            written, places = _write_masks(tokens, spans, masking)
            rows.extend((len(context), *place, *span) for place, span in zip(places, spans, strict=True))
            masked.append(written)
            context.append(tokens)
    columns = torch.tensor(rows, dtype=torch.long).reshape(-1, 5).unbind(dim=1)
    return {
        "id": torch.tensor([sample["id"] for sample in samples]),
        "nsentences": len(context),
        "ntokens": sum(len(tokens) for tokens in context),
        "num_groups": len(samples),
        "num_groups_without_spans": sum(not sample["spans"] for sample in samples),
        "net_input": {
            "src_tokens": padded(masked, masking.pad),
            "src_lengths": torch.tensor([len(tokens) for tokens in masked]),
        },
        "context": {"src_tokens": padded(context, masking.pad)},
        "spans": dict(zip(("sequence", "query_start", "query_end", "start", "length"), columns, strict=True)),
        "mask_context": samples[0]["mask_context"],
    }


def _write_masks(
    tokens: np.ndarray, spans: list[tuple[int, int]], masking: SpanMasking
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """``tokens`` with masks in place of ``spans``, and the positions of the first and last mask of each span."""
    masks = [masking.start_mask] if masking.single else [masking.start_mask, masking.end_mask]
    parts: list[Any] = []
    places = []
    done = written = 0
    for start, length in spans:
        parts += [tokens[done:start], masks]
        written += start - done + len(masks)
        places.append((written - len(masks), written - 1))
        done = start + length
    return np.concatenate([*parts, tokens[done:]]).astype(np.int64), places


def padded(rows: Sequence[Any], value: int) -> Tensor:
    """Rows of whole numbers as an int64 matrix, padded at their ends with ``value``; it has one column or more."""
    found = torch.full((len(rows), max(1, *map(len, rows))), value)
    for row, numbers in zip(found, rows, strict=True):
        row[: len(numbers)] = torch.from_numpy(np.asarray(numbers, dtype=np.int64))
    return found


def _fitting(
    spans: list[tuple[int, int, int]], sequences: Sequence[np.ndarray], masking: SpanMasking
) -> list[tuple[int, int, int]]:
    """``spans`` without those of one token, from the last on, that would make a masked sequence too long."""
    if masking.max_length is None or masking.single:
        return spans
    length = [len(tokens) for tokens in sequences]
    for sequence, _, span_length in spans:
        length[sequence] += 2 - span_length
    kept = []
    for span in reversed(spans):
        if span[2] == 1 and length[span[0]] > masking.max_length:
            length[span[0]] -= 1
        else:
            kept.append(span)
    return kept[::-1]


def consecutive_groups(num_blocks: int, group_size: int, *, order: np.ndarray | None = None) -> list[np.ndarray]:
    """Numbers of the blocks of each group: ``group_size`` consecutive blocks, in the given ``order`` if there is one.

    No group has only one block, unless there is only one block.
    """
    numbers = np.arange(num_blocks) if order is None else order
    groups = [numbers[start : start + group_size] for start in range(0, num_blocks, group_size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [np.concatenate(groups[-2:])]
    return groups
