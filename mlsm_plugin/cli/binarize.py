"""``mlsm binarize``: turn raw text into the dataset that fairseq tasks load."""

from __future__ import annotations

import argparse
import os

from mlsm_plugin.cli.coding_options import add_max_unk_rate, check_positive
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
    parser.add_argument("--train", nargs="+", default=[], metavar="FILE", help=text)
    parser.add_argument("--valid", nargs="+", default=[], metavar="FILE", help="validation text in the same form")
    parser.add_argument("--test", nargs="+", default=[], metavar="FILE", help="test text in the same form")
    pairs = parser.add_argument_group(
        "pairs", "instead of --train and --valid: texts with <extra_id_0>, ... and their targets, for span_denoising"
    )
    pairs.add_argument("--source", metavar="FILE", help="training sources, one on each line")
    pairs.add_argument("--target", metavar="FILE", help="training targets, each on the line of its source")
    pairs.add_argument("--valid-source", metavar="FILE", help="validation sources")
    pairs.add_argument("--valid-target", metavar="FILE", help="validation targets")
    pairs.add_argument(
        "--sentinels", type=int, default=100, metavar="N", help="number of sentinels, as in --task span_denoising"
    )
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
    if args.source or args.target or args.valid_source or args.valid_target:
        return _run_pairs(args)
    if not (args.train and args.valid):
        raise ValueError("--train and --valid are required (for pairs: --source and --target)")
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


def _run_pairs(args: argparse.Namespace) -> int:
    from mlsm_plugin.tokenization.binarize_pairs import binarize_pairs

    if args.train or args.valid or args.test:
        raise ValueError("--source and --target cannot be combined with --train, --valid or --test")
    if not (args.source and args.target) or bool(args.valid_source) != bool(args.valid_target):
        raise ValueError(
            "pairs need both --source and --target, and both or neither of --valid-source and --valid-target"
        )
    check_positive(args, "sentinels")
    splits = {"train": (args.source, args.target)}
    if args.valid_source:
        splits["valid"] = (args.valid_source, args.valid_target)
    figures = binarize_pairs(
        tokenizer=args.tokenizer,
        splits=splits,
        output=args.output,
        sentinels=args.sentinels,
        max_unk_rate=args.max_unk_rate,
    )
    for split, of_split in figures.items():
        print(f"{split}: " + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in of_split.items()))
    return 0
