"""``mlsm binarize``: turn raw text into the dataset that fairseq tasks load."""

from __future__ import annotations

import argparse
import os

from mlsm_plugin.cli.coding_options import add_max_unk_rate
from mlsm_plugin.cli.output_folder import output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mlsm binarize``."""
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="folder that `mlsm tokenizer` wrote, or hf:PATH, a Hugging Face folder or hub name",
    )
    text = "training text: UTF-8, plain or .gz, .bz2, .xz, one sentence a line, blank lines between documents"
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help=text)
    parser.add_argument("--valid", nargs="+", required=True, metavar="FILE", help="validation text in the same form")
    parser.add_argument("--test", nargs="+", default=[], metavar="FILE", help="test text in the same form")
    parser.add_argument(
        "--output", type=output_folder, required=True, metavar="DATA_BIN", help="the data folder to write"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        metavar="N",
        help="number of processes; the output does not depend on it",
    )
    add_max_unk_rate(parser, of="a split")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Binarize the splits and print their statistics."""
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
