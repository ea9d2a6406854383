"""``mlsm binarize``: raw text to the dataset that fairseq tasks load."""

from __future__ import annotations

import argparse
import os

from mlsm_plugin.cli.coding_options import check_positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mlsm binarize``."""
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="folder that `mlsm tokenizer` wrote, or hf:PATH, a folder or hub name of Hugging Face",
    )
    text = "UTF-8 text, plain or .gz, one sentence a line, blank lines between documents"
    parser.add_argument("--train", nargs="+", default=[], metavar="FILE", help=text)
    parser.add_argument("--valid", nargs="+", default=[], metavar="FILE", help="the same for validation")
    parser.add_argument("--test", nargs="+", default=[], metavar="FILE", help="the same for testing")
    pairs = parser.add_argument_group(
        "pairs", "instead of --train and --valid: texts with <extra_id_0>, ... and their targets, for span_denoising"
    )
    pairs.add_argument("--source", metavar="FILE", help="a source a line, for training")
    pairs.add_argument("--target", metavar="FILE", help="the target of each, on the same line")
    pairs.add_argument("--valid-source", metavar="FILE", help="the same for validation")
    pairs.add_argument("--valid-target", metavar="FILE", help="the same for validation")
    pairs.add_argument("--sentinels", type=int, default=100, metavar="N", help="as in --task span_denoising")
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
    if args.source or args.target or args.valid_source or args.valid_target:
        return _run_pairs(args)
    if not (args.train and args.valid):
        raise ValueError("--train and --valid are needed (or --source and --target, for pairs)")
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
        raise ValueError("--source and --target go without --train, --valid and --test")
    if not (args.source and args.target) or bool(args.valid_source) != bool(args.valid_target):
        raise ValueError("pairs need --source and --target, and --valid-target with --valid-source")
    check_positive(args, "sentinels")
    splits = {"train": (args.source, args.target)}
    if args.valid_source:
        splits["valid"] = (args.valid_source, args.valid_target)
    figures = binarize_pairs(tokenizer=args.tokenizer, splits=splits, output=args.output, sentinels=args.sentinels)
    for split, of_split in figures.items():
        print(f"{split}: " + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in of_split.items()))
    return 0
