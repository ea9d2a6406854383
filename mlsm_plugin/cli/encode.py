"""``mlsm encode``: sparse-code the hidden states of a binarized dataset."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mlsm_plugin.cli.coding_options import add_block_options, add_model_options, check_positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = "A run that was stopped is continued by the same command."
    parser.add_argument("data_bin", metavar="DATA_BIN", help="binarized dataset; gets <split>.codes folders")
    parser.add_argument("--auxiliary", required=True, metavar="CHECKPOINT", help="the model of the dictionary")
    parser.add_argument("--dictionary", required=True, metavar="DICT_DIR", help="folder that `mlsm dictionary` wrote")
    parser.add_argument("--layer", type=int, metavar="L", help="hidden state (default: the dictionary's)")
    parser.add_argument(
        "--lambda", dest="lambda_", type=float, help="weight of the L1 penalty (default: the dictionary's)"
    )
    parser.add_argument("--splits", nargs="+", default=["train", "valid"], metavar="SPLIT", help="splits to code")
    parser.add_argument(
        "--solver", default="auto", choices=["auto", "spams", "fista"], help="auto: spams, and fista where that fails"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="certified relative duality gap that iterative solvers reach"
    )
    parser.add_argument("--max-nonzeros", type=int, metavar="N", help="at most so many atoms per token (default: any)")
    parser.add_argument(
        "--shard-tokens", type=int, default=1 << 18, metavar="N", help="tokens of a shard, the unit of resuming"
    )
    add_block_options(parser)
    add_model_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Code each split and say how exact the codes are."""
    from mlsm_plugin.auxiliary.block_reader import BlockSettings
    from mlsm_plugin.auxiliary.corpus_coding import CodingSettings, encode_split
    from mlsm_plugin.sparse_coding.code_store import CodeStore
    from mlsm_plugin.sparse_coding.dictionary import Dictionary

    check_positive(args, "lambda_", "tolerance", "max_nonzeros", "threads", "shard_tokens")
    check_positive(args, "batch_tokens")
    dictionary = Dictionary.load(args.dictionary)
    settings = CodingSettings(
        layer=args.layer if args.layer is not None else dictionary.meta["layer"],
        lambda_=args.lambda_ or dictionary.meta["lambda"],
        blocks=BlockSettings(args.tokens_per_sample, args.sample_break_mode),
        solver=args.solver,
        tolerance=args.tolerance,
        max_nonzeros=args.max_nonzeros,
        threads=args.threads,
        fp16=args.fp16,
        batch_tokens=args.batch_tokens,
        shard_tokens=args.shard_tokens,
    )
    for split in args.splits:
        start = time.perf_counter()
        figures = encode_split(
            args.data_bin,
            split,
            auxiliary=args.auxiliary,
            dictionary=dictionary,
            settings=settings,
            device=args.device,
        )
        seconds = time.perf_counter() - start
        if figures.already_complete:
            print(f"{split}: nothing to do, {figures.directory} is complete")
            continue
        meta = CodeStore(str(figures.directory)).meta
        print(
            f"{split}: {figures.coded_tokens} tokens coded in {seconds:.1f} s "
            f"({figures.coded_tokens / seconds:.0f} a second), duality gap mean {figures.gap_mean:.1e}, "
            f"max {figures.gap_max:.1e}"
        )
        size = sum(file.stat().st_size for file in Path(figures.directory).iterdir())
        print(f"  {figures.directory}: {meta['nnz']} non-zeros, {size / 1e6:.1f} MB")
    return 0
