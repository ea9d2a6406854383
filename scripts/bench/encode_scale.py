"""Measure speed, disk space and memory of coding at growing sizes, and extrapolate to a billion tokens.

    python scripts/bench/encode_scale.py [--tokens 1000000 4000000 16000000]
    python scripts/bench/encode_scale.py --before CHECKOUT --encode DATA --auxiliary AUX --dictionary DICT [...]

Synthetic hidden states are coded and written as in ``mlsm encode`` (batches, shards, the same solver and writer). Each
size has its own process, and the peak resident memory of that process is reported. The memory includes a constant part
(the interpreter, torch, the dictionary), but no auxiliary model, whose cost is that of a forward pass.

With ``--before``, ``mlsm encode`` of this checkout and of another one run in turn instead, with the words after
``--encode``. Both must write the same bytes.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.core.sparse_coding.encode import normalize_rows, sparse_encode

BATCH_TOKENS = 8192
SHARD_TOKENS = 1 << 18
CONTENT = 20  # one in this many tokens is a special symbol and has no code
BILLION = 10**9


def code(tokens: int, n_atoms: int, dim: int, lambda_: float, directory: Path) -> dict[str, float]:
    """Code ``tokens`` synthetic tokens into a store at ``directory``; returns the cost."""
    rng = np.random.default_rng(0)
    atoms = normalize_rows(0.8 * rng.standard_normal(dim) + rng.standard_normal((n_atoms, dim))).astype(np.float32)
    boundaries = [*range(0, tokens, SHARD_TOKENS), tokens]
    sparse_encode(atoms[:8], atoms, lambda_=lambda_)  # compile before the clock starts
    start = time.perf_counter()
    writer = CodeStoreWriter(directory, {"n_atoms": n_atoms}, boundaries)
    for index, first, last in writer.missing_shards():
        parts = []
        for begin in range(first, last, BATCH_TOKENS):
            size = min(BATCH_TOKENS, last - begin)
            chosen = rng.integers(n_atoms, size=(size, 12))
            mixtures = np.einsum("rk,rkd->rd", rng.exponential(size=chosen.shape).astype(np.float32), atoms[chosen])
            mixtures += 0.3 * rng.standard_normal((size, dim), dtype=np.float32)
            mixtures[::CONTENT] = 0
            parts.append(sparse_encode(normalize_rows(mixtures), atoms, lambda_=lambda_).codes)
        writer.write_shard(index, sp.vstack(parts, format="csr"))
    writer.finish()
    seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    stored = sum(path.stat().st_size for path in directory.iterdir())
    return {
        "tokens": tokens,
        "speed": tokens / seconds,
        "bytes": stored / tokens,
        "nonzeros": json.loads((directory / "meta.json").read_text())["mean_nonzeros"],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6,
    }


def compare(before: Path, words: list[str], rounds: int) -> int:
    """Run ``mlsm encode`` of two checkouts in turn; the first round does not count. Returns 1 if a file differs."""
    checkouts = {"before": before, "now": Path(__file__).parents[2]}
    speeds: dict[str, list[float]] = {name: [] for name in checkouts}
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    differ: set[str] = set()
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="encode_scale.") as folder:
            for name in sorted(checkouts, reverse=number % 2 == 1):
                command = [
                    sys.executable,
                    "-m",
                    "mlsm_plugin.cli.main",
                    "encode",
                    *words,
                    "--output",
                    f"{folder}/{name}",
                ]
                used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
                environment = {**os.environ, "PYTHONPATH": str(checkouts[name].resolve()), "PYTHONSAFEPATH": "1"}
                output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
                coded = re.findall(r"([0-9]+) tokens coded in ([0-9.]+) s", output)
                if number:
                    speeds[name].append(sum(int(tokens) for tokens, _ in coded) / sum(float(s) for _, s in coded))
                    seconds[name].append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used)
            files = [
                str(path.relative_to(f"{folder}/now")) for path in Path(folder, "now").rglob("*") if path.is_file()
            ]
            _, differing, absent = filecmp.cmpfiles(f"{folder}/before", f"{folder}/now", files, shallow=False)
            differ.update(differing + absent)
    for name in checkouts:
        print(f"{name:8} {statistics.median(speeds[name]):9.0f} coded tokens/s", end="")
        print(f" {statistics.median(seconds[name]):7.1f} s of processor time", flush=True)
    faster = statistics.median(now / then for now, then in zip(speeds["now"], speeds["before"], strict=True))
    less = statistics.median(then / now for now, then in zip(seconds["now"], seconds["before"], strict=True))
    print(f"ratio {faster:.2f} (processor time: {less:.2f}); files that differ: {', '.join(sorted(differ)) or 'none'}")
    return 1 if differ else 0


def main() -> int:
    """Start a process for each size, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--atoms", type=int, default=512)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lambda", dest="lambda_", type=float, default=0.05)
    parser.add_argument("--directory", help="where the stores are written (default: a temporary folder)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare with mlsm encode of this checkout")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of --before (default: 5)")
    parser.add_argument("--encode", nargs=argparse.REMAINDER, default=[], help="words for mlsm encode, of --before")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.before:
        return compare(args.before, args.encode, args.rounds)
    if args.worker:
        print(json.dumps(code(args.tokens[0], args.atoms, args.dim, args.lambda_, Path(args.directory))))
        return 0
    print(f"{args.dim} wide, {args.atoms} atoms, lambda {args.lambda_}")
    print(f"{'tokens':>14} {'tokens/s':>9} {'non-zeros':>9} {'bytes/token':>11} {'disk':>9} {'peak memory':>12}")
    for tokens in args.tokens:
        with tempfile.TemporaryDirectory(prefix="encode_scale.", dir=args.directory) as folder:
            options = ("--atoms", args.atoms, "--dim", args.dim, "--lambda", args.lambda_, "--directory", folder)
            command = [sys.executable, __file__, "--worker", "--tokens", str(tokens), *map(str, options)]
            cost = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        disk = cost["bytes"] * tokens / 1e9
        print(f"{tokens:14} {cost['speed']:9.0f} {cost['nonzeros']:9.1f} {cost['bytes']:11.1f} ", end="")
        print(f"{disk:6.2f} GB {cost['memory']:9.0f} MB", flush=True)
    hours = BILLION / cost["speed"] / 3600
    disk = cost["bytes"]
    print(f"{BILLION:14} {'':9} {'':9} {'':11} {disk:6.0f} GB, {hours:.1f} hours at the last speed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
