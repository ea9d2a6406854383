"""Measure how much faster reading the codes of masked tokens is than training a model on them.

    python scripts/bench/code_store_reads.py [--size tiny]

One run measures both, on the same synthetic data and batches: the look-up of the codes of a batch's masked tokens in a
memory-mapped code store, and a whole training step of ``mlsm_roberta_SIZE`` with the MLSM loss. The store is much
larger than the batches, so each look-up reads new positions (but the operating system may hold the files in memory).
Target: at least 20 times.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import mlsm_step
import numpy as np

from mlsm_plugin.core.sparse_coding.code_store import CodeStore

TARGET = 20


def parse_args() -> argparse.Namespace:
    """The options, including those of ``mlsm_step``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=mlsm_step.SIZES, default="tiny", help="mlsm_roberta_SIZE is trained")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="tokens in the store (default: 4 million)")
    parser.add_argument("--nonzeros", type=float, default=42.0, help="mean non-zeros of a code (default: 42)")
    parser.add_argument("--rounds", type=int, default=30, help="number of counted steps (default: 30)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    shared = {"batch_size": 16, "block": 128, "vocab": 30_000, "atoms": 3000, "seed": 1}
    return argparse.Namespace(**{**shared, **vars(args)})


def main() -> int:
    """Measure and print the ratio of the medians."""
    args = parse_args()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory(prefix="code_store_reads.") as folder:
        prefix = Path(folder) / "train"
        mlsm_step.write_codes(prefix, mlsm_step.write_text(prefix, args, rng), args, rng)
        training = mlsm_step.build_training("mlsm", prefix.parent, args, mlsm_step.MLSM_FLAGS)
        store = CodeStore(f"{prefix}.codes")
        masked = round(0.15 * args.batch_size * args.block)
        reads = []
        for round_ in range(-2, args.rounds):
            training.step(rng.integers(len(training.dataset), size=args.batch_size), counted_round=round_)
            positions = rng.integers(store.num_tokens, size=masked)
            start = time.perf_counter()
            store.lookup(positions)
            reads.append(time.perf_counter() - start)
    step = np.median(training.seconds)
    read = np.median(reads[2:])
    print(f"store of {args.tokens} tokens, {args.nonzeros:g} non-zeros each; {masked} masked tokens a batch")
    print(f"look-up {1e3 * read:.2f} ms a batch, {masked / read:.0f} tokens a second")
    print(f"training step of mlsm_roberta_{args.size} ({args.device}) {1e3 * step:.1f} ms, data included")
    print(f"a look-up is {step / read:.1f} times as fast as a step (target: {TARGET})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
