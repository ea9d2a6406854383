"""Groups of sequences whose common spans are masked, and their batches (Min et al., 2022)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlsm_plugin.core.files.settings import check, option
from mlsm_plugin.core.masking.span_corruption import padded
from mlsm_plugin.core.masking.word_boundaries import PieceClasses, word_boundaries


@dataclass(frozen=True)
class SpanRules:
    """The rules by which spans are drawn; ValueError if a value is out of range."""

    mask_prob: float = option(0.15, above=0, most=1, help="share of the group's tokens to mask")
    length_p: float = option(
        0.5, above=0, most=1, help="p of the geometric distribution of lengths: 1 with probability p, 2 with p (1 - p)"
    )
    max_length: int = option(10, least=1, help="maximum length; a longer draw counts as this length")
    punctuation_prob: float = option(
        0.1, least=0, most=1, help="probability that a single punctuation token may be masked"
    )
    max_ngram_masks: int = option(10, least=1, help="maximum number of times that one n-gram is masked in a group")
    max_spans_per_sequence: int = option(64, least=1, help="maximum number of spans of a sequence")

    def __post_init__(self) -> None:
        check(self)


def sample_spans(
    sequences: Sequence[np.ndarray], *, pieces: PieceClasses, rules: SpanRules, rng: np.random.Generator
) -> list[tuple[int, int, int]]:
    """Draw the spans to mask in a group of sequences; each also occurs in another sequence of the group.

    A span begins at the beginning of a word, ends at the end of a word, and contains no special token. Punctuation at
    the end of a word ("end" + ".") is a word of its own, and so is each token of a word longer than a span may be.
    First a length is drawn, then a span uniformly from the remaining spans of this length, or else of the next shorter
    length. Spans do not overlap, and a span of several tokens does not begin with sentence punctuation.
    :class:`SpanRules` defines the rest. All spans together hold at most ``mask_prob`` of the tokens that are not
    special (Min et al., "Nonparametric Masked Language Modeling", 2022, section 3.2).

    ``sequences`` holds the ids of each, ``(T_i,)``; ``pieces`` the classes of all ids. Returns (sequence, start,
    length) of each span, in order.
    """
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    if lengths.sum() == 0:
        return []
    tokens = np.concatenate([np.asarray(sequence) for sequence in sequences]).astype(np.int64)
    number = np.repeat(np.arange(len(lengths)), lengths)
    begins, ends = word_boundaries(tokens, number, pieces, longest=rules.max_length)
    text = _Text(tokens, number, pieces.special[tokens], begins, ends, len(pieces.special))
    budget = round(rules.mask_prob * int((~text.special).sum()))
    chosen = _choose(_queues(text, pieces, rules, rng), text, budget, rules, rng)
    first = np.cumsum(lengths) - lengths
    return [(int(number[start]), start - int(first[number[start]]), length) for start, length in sorted(chosen)]


@dataclass(frozen=True)
class _Text:
    """All tokens of a group, concatenated."""

    tokens: np.ndarray
    sequence: np.ndarray
    special: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    vocabulary: int


def _repeated_ngrams(text: _Text, max_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For n = 1, 2, ...: the starts of the n-grams that occur in several sequences, and a number for each n-gram."""
    starts = np.flatnonzero(text.begins)
    keys = text.tokens[starts]
    for length in range(1, max_length + 1):
        if len(starts) == 0:
            return
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        starts = starts[order]
        is_first = np.append(True, keys[1:] != keys[:-1])
        number = np.cumsum(is_first) - 1
        firsts = np.flatnonzero(is_first)
        sequence = text.sequence[starts]  # ascending within an n-gram, since the sort is stable
        lasts = np.append(firsts[1:], len(starts)) - 1
        in_several = (sequence[firsts] != sequence[lasts])[number]
        starts = starts[in_several]
        number = number[in_several]
        at_word_end = text.ends[starts + length - 1]
        yield starts[at_word_end], number[at_word_end]
        goes_on = starts + length < len(text.tokens)
        starts = starts[goes_on]
        number = number[goes_on]
        goes_on = (text.sequence[starts + length] == text.sequence[starts]) & ~text.special[starts + length]
        starts = starts[goes_on]
        number = number[goes_on]
        # an n-gram can only be repeated if its first n - 1 tokens are, so their number and the last token identify it
        keys = number * text.vocabulary + text.tokens[starts + length]
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        keys = keys[order]


def _queues(
    text: _Text, pieces: PieceClasses, rules: SpanRules, rng: np.random.Generator
) -> list[list[tuple[int, int]]]:
    """For each length, the starts of the spans that may be masked and the numbers of their n-grams, shuffled."""
    queues = []
    for length, (starts, numbers) in enumerate(_repeated_ngrams(text, rules.max_length), start=1):
        order = rng.permutation(len(starts))
        starts = starts[order]
        numbers = numbers[order]
        if length == 1:
            kept = ~pieces.punctuation[text.tokens[starts]] | (rng.random(len(starts)) < rules.punctuation_prob)
        else:
            kept = ~pieces.sentence_punctuation[text.tokens[starts]]
        queues.append(list(zip(starts[kept].tolist(), numbers[kept].tolist(), strict=True)))
    return queues


def _choose(
    queues: list[list[tuple[int, int]]], text: _Text, budget: int, rules: SpanRules, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """(start, length) of spans that follow the rules. A span that does not fit now never will, and is dropped."""
    chosen: list[tuple[int, int]] = []
    covered = bytearray(len(text.tokens))
    spans_of = [0] * (int(text.sequence[-1]) + 1)
    masks: dict[tuple[int, int], int] = {}  # masked spans of each n-gram, by its length and number

    def take(length: int) -> bool:
        queue = queues[length - 1]
        while queue:
            start, number = queue.pop()
            done = masks.get((length, number), 0)
            sequence = int(text.sequence[start])
            if done == rules.max_ngram_masks or spans_of[sequence] == rules.max_spans_per_sequence:
                continue
            if covered.find(1, start, start + length) >= 0:
                continue
            masks[length, number] = done + 1
            spans_of[sequence] += 1
            covered[start : start + length] = b"\1" * length
            chosen.append((start, length))
            return True
        return False

    shortest = 0  # the queues of all lengths up to this one are empty
    while budget > 0:
        # given that a geometric length is above `shortest`, the excess is geometric again
        while shortest < len(queues) and not queues[shortest]:
            shortest += 1
        if shortest >= min(len(queues), budget):
            break
        drawn = min(shortest + int(rng.geometric(rules.length_p)), rules.max_length, len(queues), budget)
        for length in range(drawn, shortest, -1):
            if take(length):
                budget -= length
                break
    return chosen


@dataclass(frozen=True)
class SpanMasking:
    """How spans are drawn and replaced by masks.

    A span of one token becomes two masks; such spans are dropped if the sequence gets too long.
    """

    pieces: PieceClasses
    rules: SpanRules
    start_mask: int  # these two ids replace a span
    end_mask: int
    pad: int
    seed: int  # with the epoch and the number of a group, decides its spans
    single: bool = False  # mask and retrieve each token of a span separately; one start_mask replaces it
    max_length: int | None = None  # of a masked sequence
    context_masking_ratio: float = 0.0  # probability that the keys of a batch come from the masked sequences


def draw_spans(sequences: Sequence[np.ndarray], masking: SpanMasking, *, epoch: int, index: int) -> dict[str, Any]:
    """A group for :func:`collate_groups`; its spans depend only on the seed, the epoch and its number ``index``."""
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
    """A batch of groups from :func:`draw_spans`.

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
    """``tokens`` with masks in place of ``spans``, and the positions of each span's first and last mask."""
    masks = [masking.start_mask] if masking.single else [masking.start_mask, masking.end_mask]
    parts = []
    places = []
    done = 0
    written = 0
    for start, length in spans:
        parts += [tokens[done:start], masks]
        written += start - done + len(masks)
        places.append((written - len(masks), written - 1))
        done = start + length
    return np.concatenate([*parts, tokens[done:]]).astype(np.int64), places


def _fitting(
    spans: list[tuple[int, int, int]], sequences: Sequence[np.ndarray], masking: SpanMasking
) -> list[tuple[int, int, int]]:
    """Drop spans of one token, the last ones first, where they would make a masked sequence too long."""
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
    """Block numbers of each group: ``group_size`` consecutive blocks, in ``order`` if it is not None.

    No group has only one block, unless there is only one block.
    """
    numbers = np.arange(num_blocks) if order is None else order
    groups = [numbers[start : start + group_size] for start in range(0, num_blocks, group_size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [np.concatenate(groups[-2:])]
    return groups
