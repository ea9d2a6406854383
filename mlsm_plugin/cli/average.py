"""``mlsm average``: average the weights of checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlsm_plugin.cli.coding_options import check_positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("checkpoints", nargs="+", metavar="PT", help="checkpoints of a run; with --last, its folder")
    parser.add_argument("--last", type=int, metavar="N", help="the N newest numbered checkpoints of the folder")
    parser.add_argument("--output", required=True, metavar="FILE", help="checkpoint to write, such as RUN/averaged.pt")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Average, and write the result with the tokenizer beside it."""
    from mlsm_plugin.fairseq_seams.checkpoint_averaging import average_checkpoints, last_checkpoints
    from mlsm_plugin.fairseq_seams.checkpoint_states import updates_of
    from mlsm_plugin.files.atomic_files import check_output_file
    from mlsm_plugin.files.model_files import copy_tokenizer

    check_positive(args, "last")
    check_output_file(args.output)
    paths = [Path(path) for path in args.checkpoints]
    if args.last is not None:
        if len(paths) > 1 or not paths[0].is_dir():
            raise ValueError("--last takes the folder of one run")
        paths = last_checkpoints(paths[0], args.last)
    average_checkpoints(paths, args.output)
    source, folder = paths[-1].parent, Path(args.output).parent
    if source.resolve() != folder.resolve():
        copy_tokenizer(source, folder)
    updates = ", ".join(f"{updates_of(path):,}" for path in paths)
    print(f"{args.output}: the mean of {len(paths)} checkpoints, of updates {updates}")
    return 0
