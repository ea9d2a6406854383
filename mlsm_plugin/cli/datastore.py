"""``mlsm datastore build``: store the hidden states of a corpus' tokens, for retrieval."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from mlsm_plugin.cli.coding_options import (
    add_block_options,
    add_model_options,
    add_share_options,
    block_settings,
    check_positive,
)
from mlsm_plugin.cli.output_folder import output_folder
from mlsm_plugin.retrieval.key_index import KINDS, check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "action", choices=["build"], help="build the datastore; the same command resumes a stopped build"
    )
    parser.add_argument("data_bin", metavar="DATA_BIN", help="binarized dataset of the corpus")
    parser.add_argument("--checkpoint", required=True, metavar="PT", help="model whose hidden states are the keys")
    parser.add_argument("--output", type=output_folder, required=True, metavar="DIR", help="folder of the datastore")
    parser.add_argument(
        "--splits", nargs="+", default=["train"], metavar="SPLIT", help="splits of the binarized dataset"
    )
    parser.add_argument("--word-boundaries-only", action="store_true", help="keep only tokens that begin or end a word")
    parser.add_argument(
        "--drop-stopwords",
        metavar="FILE",
        help="file of words, one on each line; those that are a single token get no key",
    )
    parser.add_argument("--dtype", default="float16", choices=["float16", "float32"], help="data type of the keys")
    add_block_options(parser)
    parser.add_argument(
        "--shard-tokens", type=int, default=1 << 16, metavar="N", help="tokens in a shard; limits the memory"
    )
    parser.add_argument(
        "--index",
        default="none",
        choices=KINDS,
        help="kind of index. none: exact, each search reads all keys; flat: exact; ivfpq: approximate, small and fast. "
        "flat and ivfpq need faiss (pip install 'mlsm_plugin[retrieval]'), and can be added to a complete datastore",
    )
    add_model_options(parser)
    add_share_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Estimate, then build what is missing."""
    import torch

    from mlsm_plugin.files.work_share import work_share
    from mlsm_plugin.retrieval.datastore_builder import DatastoreBuilder, DatastoreSettings, read_stopwords
    from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore

    check_positive(args, "threads", "batch_tokens", "shard_tokens")
    if args.index != "none":
        check_installed()
    share = work_share(args.shard_index, args.num_shards, os.environ)
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = DatastoreSettings(
        splits=tuple(args.splits),
        blocks=block_settings(args, args.checkpoint),
        word_boundaries_only=args.word_boundaries_only,
        stopwords=read_stopwords(args.drop_stopwords),
        dtype=args.dtype,
        shard_tokens=args.shard_tokens,
    )
    builder = DatastoreBuilder(
        args.data_bin,
        args.checkpoint,
        args.output,
        settings,
        device=args.device or share.device(torch.cuda.device_count()),
        fp16=args.fp16,
        batch_tokens=args.batch_tokens,
    )
    if builder.is_complete and args.index in ("none", _kind_of_index(args.output)):
        print(f"nothing to do, {args.output} is complete")
        return 0
    print(builder.estimate(args.index), flush=True)
    start = time.perf_counter()
    if not builder.build(share):
        print(
            f"process {share.index} of {share.count} is done; shards of other processes are missing (if one "
            "failed, run the same command again)"
        )
        return 0
    store = PhraseDatastore(args.output)
    if args.index != "none":
        store.build_index(args.index)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in store.directory.glob("[!.]*"))
    print(
        f"{args.output}: {len(store):,} keys of {store.meta['num_tokens']:,} tokens, {store.dim} wide, "
        f"{size / 1e6:.1f} MB ({size / store.meta['num_tokens']:.0f} bytes a token), {seconds:.1f} s"
    )
    return 0


def _kind_of_index(directory: str) -> str:
    from mlsm_plugin.retrieval.key_index import KeyIndex

    index = KeyIndex.open(Path(directory))
    return "none" if index is None else index.kind
