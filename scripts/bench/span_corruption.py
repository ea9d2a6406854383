#!/usr/bin/env python3
"""Measure how fast texts are corrupted, compared with the dataset of fairseq's ``span_masked_lm``.

    python scripts/bench/span_corruption.py [--length 568]

Both corrupt the same random texts, one at a time, in alternating order, without collating; the ratio is the median over
the rounds of the ratios within a round. Target: at least as fast.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.data.span_mask_tokens_dataset import SpanMaskedTokensDataset

from mlsm_plugin.core.masking.span_corruption import SpanNoise
from mlsm_plugin.fairseq_plugin.data.span_datasets import Corruption, SpanDenoisingDataset
from mlsm_plugin.fairseq_plugin.text.masked_text import sentinel_symbols

SENTINELS = 100


class _Texts(list):
    """Texts in memory, with their lengths."""

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(text) for text in self])


def parse_args() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--length", type=int, default=568, help="tokens in a text (default: 568, which gives sources of 512)"
    )
    parser.add_argument("--texts", type=int, default=200, help="texts in a round (default: 200)")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--noise-density", type=float, default=0.15)
    parser.add_argument("--mean-span-length", type=float, default=3.0)
    return parser.parse_args()


def seconds_for(dataset: Any, number: int) -> float:
    """Seconds to corrupt ``number`` texts."""
    start = time.perf_counter()
    for index in range(number):
        dataset[index]
    return time.perf_counter() - start


def main() -> int:
    """Measure and print tokens per second, and the ratio."""
    args = parse_args()
    torch.set_num_threads(1)
    dictionary = Dictionary()
    for piece in [*(f"p{i}" for i in range(args.vocab)), *sentinel_symbols(SENTINELS)]:
        dictionary.add_symbol(piece)
    rng = np.random.default_rng(1)
    texts = rng.integers(4, 4 + args.vocab, size=(args.texts, args.length))
    sentinels = np.array([dictionary.index(symbol) for symbol in sentinel_symbols(SENTINELS)])
    noise = SpanNoise(args.noise_density, args.mean_span_length)
    corruption = Corruption(noise, sentinels, dictionary.eos(), dictionary.pad(), args.length, seed=1)
    ours = SpanDenoisingDataset(_Texts(torch.from_numpy(texts)), corruption, shuffle=False)
    with_eos = _Texts(torch.from_numpy(np.pad(texts, ((0, 0), (0, 1)), constant_values=dictionary.eos())))
    fairseqs = SpanMaskedTokensDataset(with_eos, dictionary, args.noise_density, args.mean_span_length, shuffle=False)
    seconds: dict[str, list[float]] = {"ours": [], "span_masked_lm": []}
    for round_ in range(args.rounds + 1):
        for name, dataset in sorted({"ours": ours, "span_masked_lm": fairseqs}.items(), reverse=bool(round_ % 2)):
            seconds[name].append(seconds_for(dataset, args.texts))
    medians = {name: float(np.median(values[1:])) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name}: {args.texts * args.length / value:,.0f} tokens a second")
    ratio = np.median(np.array(seconds["span_masked_lm"][1:]) / np.array(seconds["ours"][1:]))
    print(f"ours is {ratio:.2f} times as fast (target: 1)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
