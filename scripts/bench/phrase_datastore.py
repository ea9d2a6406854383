#!/usr/bin/env python3
"""Measure how fast a datastore is built and searched, and how large it is.

    python scripts/bench/phrase_datastore.py DATA_BIN CHECKPOINT [--split train] [--threads 1]

1. Building, compared with only the forward passes of the same model on the same batches, which is the lower limit.
2. Searching for the nearest k keys of a query (hidden states of the text itself, with noise): by comparing all keys,
   read from disk in float16; with faiss' exact index in memory in float32, the peer; and with ``--index ivfpq``, also
   the share of the true nearest keys that it finds. Times are medians over single queries; ratios are to the peer.
3. Bytes per token of the keys and of each index.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings, batches_of
from mlsm_plugin.retrieval import DatastoreSettings, PhraseDatastore
from mlsm_plugin.retrieval.datastore_builder import DatastoreBuilder
from mlsm_plugin.retrieval.key_index import KeyIndex, faiss_or_none


def parse_args() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_bin", metavar="DATA_BIN", help="binarized dataset, e.g. demo/run/data-bin")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="model of that dataset, e.g. demo/model/checkpoint_last.pt"
    )
    parser.add_argument("--split", default="train")
    parser.add_argument("--tokens-per-sample", type=int, default=128)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--queries", type=int, default=20, help="number of single queries (default: 20)")
    parser.add_argument("--k", type=int, default=256, help="keys to find (default: 256)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and faiss (default: 1)")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def bare_forward_seconds(builder: DatastoreBuilder, reader: BlockReader, args: argparse.Namespace) -> float:
    """Seconds of the forward passes alone, over the same batches as the builder."""
    blocks = [part for index in range(len(reader)) for part in reader.block(index)]
    seconds = 0.0
    for first in range(0, len(blocks), 256):
        for tokens, _ in batches_of(
            blocks[first : first + 256], pad=reader.dictionary.pad(), max_tokens=args.batch_tokens
        ):
            start = time.perf_counter()
            builder.encoder.hidden_states(tokens).cpu()
            seconds += time.perf_counter() - start
    return seconds


def median_ms(search: Callable[[Tensor], object], queries: Tensor) -> float:
    """Median milliseconds of a single query."""
    search(queries[:1])
    seconds = []
    for query in queries:
        start = time.perf_counter()
        search(query[None])
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))


def folder_bytes(directory: Path, pattern: str) -> int:
    """Total size of the files that match."""
    return sum(file.stat().st_size for file in directory.glob(pattern))


def main() -> int:
    """Measure and print."""
    args = parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    faiss = faiss_or_none()
    faiss.omp_set_num_threads(args.threads)
    blocks = BlockSettings(args.tokens_per_sample)
    with tempfile.TemporaryDirectory(prefix="phrase_datastore.") as folder:
        settings = DatastoreSettings(splits=(args.split,), blocks=blocks)
        builder = DatastoreBuilder(
            *(args.data_bin, args.checkpoint, Path(folder) / "store", settings),
            device=args.device,
            batch_tokens=args.batch_tokens,
        )
        start = time.perf_counter()
        builder.build()
        built = time.perf_counter() - start
        store = PhraseDatastore(Path(folder) / "store")
        bare = bare_forward_seconds(builder, builder.readers[0], args)
        num_tokens = store.meta["num_tokens"]
        print(f"{len(store):,} keys of {num_tokens:,} tokens, {store.dim} wide, {args.threads} threads")
        print(f"build {num_tokens / built:,.0f} tokens/s, bare forward {num_tokens / bare:,.0f}: {built / bare:.2f} x")
        print(f"{folder_bytes(store.directory, '*.npy') / num_tokens:.1f} bytes a token")
        return measure_searches(store, args, faiss)


def measure_searches(store: PhraseDatastore, args: argparse.Namespace, faiss: object) -> int:
    """Print milliseconds per query, ratios to faiss' exact index, and recall; returns the exit status."""
    rng = np.random.default_rng(1)
    rows = np.sort(rng.choice(len(store), size=args.queries, replace=False))
    queries = store.keys_of(rows)
    queries += 0.5 * queries.std(axis=0) * rng.standard_normal(queries.shape).astype(np.float32)
    vectors = torch.from_numpy(queries)
    similarity = store.meta["similarity"]

    def search(query: Tensor) -> tuple[Tensor, Tensor]:
        return store.search(query, args.k, similarity=similarity)

    exact = search(vectors)
    times = {"all keys compared": median_ms(search, vectors)}
    peer = faiss.IndexFlatIP(store.dim) if similarity == "inner" else faiss.IndexFlatL2(store.dim)  # type: ignore[attr-defined]
    for keys in store._chunks(torch.device("cpu")):
        peer.add(keys.numpy())
    times["faiss flat in memory (peer)"] = median_ms(lambda query: peer.search(query.numpy(), args.k), vectors)
    peer.reset()
    start = time.perf_counter()
    try:
        store.build_index("ivfpq")
    except ValueError as error:
        print(f"phrase_datastore: error: {error}", file=sys.stderr)
        return 1
    made = time.perf_counter() - start
    assert isinstance(store.index, KeyIndex)
    times["ivfpq"] = median_ms(search, vectors)
    nearest = [set(a) & set(b) for a, b in zip(search(vectors)[1].tolist(), exact[1].tolist(), strict=True)]
    recall = sum(map(len, nearest)) / (args.k * args.queries)
    for name, milliseconds in times.items():
        ratio = milliseconds / times["faiss flat in memory (peer)"]
        print(f"{name}: {milliseconds:.1f} ms a query, {ratio:.3f} of the peer")
    size = folder_bytes(store.directory, "index.faiss") / store.meta["num_tokens"]
    print(f"ivfpq: made in {made:.0f} s, {size:.1f} bytes a token, finds {recall:.3f} of the {args.k} nearest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
