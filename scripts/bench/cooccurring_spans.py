#!/usr/bin/env python3
"""Measure how fast the spans of a group are drawn, compared with a dictionary of tuples.

    python scripts/bench/cooccurring_spans.py [--data-bin DIR] [--groups 40]

Both methods draw spans by the same rules. They differ in how they find the n-grams that occur in several sequences of
the group: ours sorts integers for n = 1, 2, ..., and only continues with repeated n-grams; the other puts each n-gram
of up to ten tokens into a dictionary of tuples. In every round both draw from the same group, in alternating order;
the ratio is the median over the rounds of the ratios within a round. The bench checks that both find the same n-grams
(exit status 1 if not). Target: at most 15 ms for a group of 16 x 256 tokens on one core.

Without --data-bin, the text is synthetic: Zipf-distributed pieces, with repeated phrases.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from fairseq.data import Dictionary

from mlsm_plugin.core.masking import span_groups
from mlsm_plugin.core.masking.span_groups import SpanRules, sample_spans
from mlsm_plugin.core.masking.word_boundaries import PieceClasses, word_boundaries
from mlsm_plugin.fairseq_plugin.data.token_blocks import cut_into_blocks, load_dictionary, load_split

TARGET_MS = 15
WORD_SHARE = 0.7  # share of the synthetic pieces that begin a word


def parse_args() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-bin", type=Path, help="take the groups from the training split of this dataset")
    parser.add_argument("--groups", type=int, default=40, help="rounds, each with another group (default: 40)")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens-per-sample", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=30_000, help="number of pieces of the synthetic text")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def synthetic_groups(args: argparse.Namespace) -> tuple[PieceClasses, list[list[np.ndarray]]]:
    """Zipf-distributed pieces; a tenth of the text consists of phrases of 2 to 8 pieces from a pool of the group."""
    rng = np.random.default_rng(args.seed)
    pieces = [("\u2581" if rng.random() < WORD_SHARE else "") + f"p{rank}" for rank in range(args.vocab)]
    frequency = 1.0 / (np.arange(args.vocab) + 2.7)
    frequency /= frequency.sum()
    groups = []
    for _ in range(args.groups):
        pool = [rng.choice(args.vocab, size=rng.integers(2, 9), p=frequency) for _ in range(40)]
        group = []
        for _ in range(args.group_size):
            tokens = rng.choice(args.vocab, size=args.tokens_per_sample, p=frequency)
            for _ in range(args.tokens_per_sample // 50):
                phrase = pool[rng.integers(len(pool))]
                place = rng.integers(len(tokens) - len(phrase))
                tokens[place : place + len(phrase)] = phrase
            group.append(tokens + 1)
        groups.append(group)
    return PieceClasses.of_vocabulary(["<s>", *pieces], [0]), groups


def groups_of_text(args: argparse.Namespace) -> tuple[PieceClasses, list[list[np.ndarray]]]:
    """Groups of consecutive blocks of a binarized text, spread over it."""
    dictionary: Dictionary = load_dictionary(str(args.data_bin))
    blocks = cut_into_blocks(
        load_split(str(args.data_bin / "train"), dictionary),
        dictionary=dictionary,
        tokens_per_sample=args.tokens_per_sample,
        sample_break_mode="complete",
        bos=dictionary.bos(),
    )
    firsts = np.linspace(0, len(blocks) - args.group_size, args.groups).astype(int)
    groups = [[blocks[int(first) + i].numpy() for i in range(args.group_size)] for first in firsts]
    special = [*range(dictionary.nspecial), dictionary.index("<mask>")]
    return PieceClasses.of_vocabulary(dictionary.symbols, special), groups


def ngrams_by_tuples(text: span_groups._Text, max_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Find the same n-grams as ``_repeated_ngrams``, in the obvious way."""
    tokens = text.tokens.tolist()
    sequence = text.sequence.tolist()
    for length in range(1, max_length + 1):
        where: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for start in np.flatnonzero(text.begins).tolist():
            stop = start + length
            if stop > len(tokens) or sequence[stop - 1] != sequence[start] or text.special[start:stop].any():
                continue
            where[tuple(tokens[start:stop])].append(start)
        starts = []
        numbers = []
        for number, places in enumerate(where.values()):
            if sequence[places[0]] != sequence[places[-1]]:
                whole_words = [start for start in places if text.ends[start + length - 1]]
                starts += whole_words
                numbers += [number] * len(whole_words)
        yield np.array(starts, dtype=np.int64), np.array(numbers, dtype=np.int64)


def found_by(finder: object, group: list[np.ndarray], pieces: PieceClasses, rules: SpanRules) -> list[list[int]]:
    """The starts of the repeated n-grams of each length."""
    tokens = np.concatenate(group)
    number = np.repeat(np.arange(len(group)), [len(sequence) for sequence in group])
    begins, ends = word_boundaries(tokens, number, pieces, longest=rules.max_length)
    text = span_groups._Text(tokens, number, pieces.special[tokens], begins, ends, len(pieces.special))
    ngrams = [sorted(starts.tolist()) for starts, _ in finder(text, rules.max_length)]  # type: ignore[operator]
    return ngrams + [[]] * (rules.max_length - len(ngrams))


def main() -> int:
    """Measure and print milliseconds per group, and the ratio."""
    args = parse_args()
    pieces, groups = groups_of_text(args) if args.data_bin else synthetic_groups(args)
    rules = SpanRules()
    finders = {"sorted integers": span_groups._repeated_ngrams, "dictionary of tuples": ngrams_by_tuples}
    seconds: dict[str, list[float]] = {name: [] for name in finders}
    agree = True
    masked = []
    for number, group in enumerate(groups):
        ngrams = [found_by(finder, group, pieces, rules) for finder in finders.values()]
        agree &= ngrams[0] == ngrams[1]
        for name in sorted(finders, reverse=bool(number % 2)):
            with mock.patch.object(span_groups, "_repeated_ngrams", finders[name]):
                start = time.perf_counter()
                spans = sample_spans(group, pieces=pieces, rules=rules, rng=np.random.default_rng(number))
                seconds[name].append(time.perf_counter() - start)
            masked.append(sum(length for _, _, length in spans) / sum(map(len, group)))
    ours, tuples = (np.array(values) for values in seconds.values())
    print(f"{args.groups} groups of {args.group_size} x {args.tokens_per_sample} tokens, {np.mean(masked):.3f} masked")
    for name, values in seconds.items():
        print(f"{name}: {1e3 * np.median(values):.2f} ms a group, {1e3 * np.max(values):.2f} at most")
    print(f"target for ours: {TARGET_MS} ms; dictionary of tuples / ours = {np.median(tuples / ours):.1f}")
    if not agree:
        print("the two do not find the same n-grams")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
