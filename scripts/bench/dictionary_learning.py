"""Compare ``mlsm dictionary`` with ``spams.trainDL``: the objective on held-out hidden states, and the time.

    python scripts/bench/dictionary_learning.py [--hidden HIDDEN.npy]

Both start from the same rows and read the same number of samples. The objective is the mean of
``0.5 ||x - a D||^2 + lambda sum(a)`` over held-out rows, which are coded exactly over each dictionary. Target: within
1 % of spams. Without a file, the hidden states are synthetic.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

import numpy as np
import torch
from sparse_coding import synthetic  # another bench in this folder

from mlsm_plugin.core.sparse_coding.dictionary import learn_dictionary, sample_distinct_rows
from mlsm_plugin.core.sparse_coding.encode import normalize_rows, sparse_encode


def learn_with_spams(
    rows: np.ndarray,
    *,
    num_atoms: int,
    lambda_: float,
    iterations: int,
    batch_size: int,
    seed: int,
    threads: int | None = None,
) -> np.ndarray:
    """Do the same as ``learn_dictionary`` with ``spams.trainDL``: (num_atoms, dim) float32, unit rows."""
    import spams

    initial = sample_distinct_rows(rows, num_atoms, np.random.default_rng(seed))
    learned = spams.trainDL(
        np.asfortranarray(rows.T),
        D=np.asfortranarray(initial.T),
        lambda1=lambda_,
        iter=iterations,
        batchsize=min(batch_size, len(rows)),
        mode=2,
        posAlpha=True,
        numThreads=threads or -1,
        verbose=False,
    )
    return normalize_rows(learned.T)


def main() -> None:
    """Learn with both, and print the objectives and times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", help="npy of hidden states (n_tokens, dim)")
    parser.add_argument("--held-out", type=int, default=4000, help="rows for the objective (default: 4000)")
    parser.add_argument("--atoms", type=int, default=3000)
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=400)
    parser.add_argument("--lambda", dest="lambda_", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where mlsm dictionary computes")
    args = parser.parse_args()
    rows = (
        np.load(args.hidden).astype(np.float32)
        if args.hidden
        else synthetic(20_000, 8 * 128, 128)[0].astype(np.float32)
    )
    rows = normalize_rows(rows)[np.random.default_rng(args.seed).permutation(len(rows))]
    train = rows[args.held_out :]
    held_out = rows[: args.held_out]
    print(f"{len(train)} rows, {rows.shape[1]} wide, {args.atoms} atoms, lambda {args.lambda_}, ", end="")
    print(f"{args.iterations} batches of {args.batch_size}; {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{'learner':8} {'objective':>10} {'to spams':>9} {'non-zeros':>9} {'unused':>7} {'seconds a batch':>16}")
    objectives: dict[str, float] = {}
    settings = {name: getattr(args, name) for name in ("lambda_", "iterations", "batch_size", "seed")}
    for name in ("spams", "torch"):
        learn = learn_with_spams if name == "spams" else partial(learn_dictionary, device=args.device)
        start = time.perf_counter()
        atoms = learn(train, num_atoms=args.atoms, **settings)
        seconds = (time.perf_counter() - start) / args.iterations
        codes = sparse_encode(held_out, atoms, lambda_=args.lambda_).codes
        loss = (
            0.5 * ((held_out - codes @ atoms) ** 2).sum(axis=1) + args.lambda_ * np.asarray(codes.sum(axis=1)).ravel()
        )
        objectives[name] = float(loss.mean())
        ratio = objectives[name] / objectives["spams"]
        unused = args.atoms - len(np.unique(codes.indices))
        print(f"{name:8} {objectives[name]:10.5f} {ratio:9.4f} {codes.nnz / len(held_out):9.1f} ", end="")
        print(f"{unused:7} {seconds:16.3f}", flush=True)


if __name__ == "__main__":
    main()
