"""``mlsm binarize``: raw text to the dataset that fairseq tasks load."""

from __future__ import annotations

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mlsm binarize``."""
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="folder that `mlsm tokenizer` wrote")
    text = "UTF-8 text, plain or .gz, one sentence a line, blank lines between documents"
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help=text)
    parser.add_argument("--valid", nargs="+", required=True, metavar="FILE", help="the same for validation")
    parser.add_argument("--test", nargs="+", default=[], metavar="FILE", help="the same for testing")
    parser.add_argument("--output", required=True, metavar="DATA_BIN", help="the data folder to write")
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        metavar="N",
        help="processes that encode; the output does not depend on it",
    )
    parser.add_argument(
        "--max-unk-rate",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="fail when a split has a larger share of unknown tokens",
    )


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Binarize the splits and print their figures."""
    from mlsm_plugin.tokenization.binarize import binarize

    figures = binarize(
        tokenizer=args.tokenizer,
        train=args.train,
        valid=args.valid,
        test=args.test,
        output=args.output,
        workers=args.workers,
        max_unk_rate=args.max_unk_rate,
    )
    print(figures.table())
    print(f"{figures.output}: dictionary of {figures.dictionary_symbols:,} symbols")
    return 0
