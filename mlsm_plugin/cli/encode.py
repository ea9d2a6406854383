"""``mlsm encode``: sparse-code the hidden states of a binarized dataset."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm_plugin.cli.coder_flags import add_coder_flags, given_coder_options
from mlsm_plugin.cli.coding_options import (
    AUXILIARY_HELP,
    add_block_options,
    add_model_options,
    add_share_options,
    block_settings,
    check_coverage,
    check_positive,
)
from mlsm_plugin.cli.next_commands import print_next, training_command
from mlsm_plugin.cli.output_folder import output_folder

if TYPE_CHECKING:
    from mlsm_plugin.auxiliary.block_coding import CodingEstimate, CodingFigures
    from mlsm_plugin.files.work_share import WorkShare
    from mlsm_plugin.hidden_states.blocks import BlockSettings
    from mlsm_plugin.sparse_coding.coder import SparseCoder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "Run the same command again to resume a stopped run. Processes that torchrun or srun start share the work; "
        "see docs/encoding.md."
    )
    parser.add_argument("data_bin", metavar="DATA_BIN", help="binarized dataset")
    parser.add_argument(
        "--output",
        type=output_folder,
        metavar="DIR",
        help="folder for the codes, <split>.codes (default: DATA_BIN); train with --latent-codes DIR",
    )
    parser.add_argument("--auxiliary", required=True, metavar="CHECKPOINT", help=AUXILIARY_HELP)
    add_dictionary_options(parser)
    parser.add_argument("--splits", nargs="+", default=["train", "valid"], metavar="SPLIT", help="splits to code")
    add_coding_options(parser)
    learned = "what the dictionary was learned with"
    add_block_options(parser, default=learned, break_mode=f"{learned}, or else complete")
    add_model_options(parser)


def add_dictionary_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what codes which hidden states."""
    parser.add_argument("--dictionary", required=True, metavar="DICT_DIR", help="folder that `mlsm dictionary` wrote")
    parser.add_argument(
        "--layer",
        type=int,
        metavar="L",
        help="hidden state to code (default: the one that the dictionary was learned from)",
    )


def add_coding_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which tokens are coded, and how; also those that share the work."""
    parser.add_argument(
        "--coverage",
        type=float,
        default=1.0,
        metavar="C",
        help="share of the positions to code, drawn with --seed; training masks only coded positions",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="random seed for --coverage")
    parser.add_argument("--estimate", action="store_true", help="only estimate disk, time and memory; write nothing")
    parser.add_argument(
        "--allow-inexact",
        action="store_true",
        help="also write codes that do not reach the required accuracy (--tolerance), with a warning",
    )
    parser.add_argument("--latent-top", type=int, metavar="N", help="keep the N strongest atoms of each code")
    add_coder_flags(parser)
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=1 << 18,
        metavar="N",
        help="tokens in a shard, the unit in which work is resumed and shared; limits the memory",
    )
    add_share_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Code each split, or estimate its cost, and report how exact the codes are."""
    from mlsm_plugin.sparse_coding.sparse_coder import torch_threads

    options = coding_arguments(args, lambda coder: block_settings(args, args.auxiliary, coder.meta.get("blocks")))
    options["auxiliary"] = args.auxiliary
    with torch_threads(args.threads):  # as many as the solver, so that the codes do not depend on torch's default
        return _estimate(args, options) if args.estimate else _encode(args, options)


def coding_arguments(args: argparse.Namespace, blocks_for: Callable[[SparseCoder], BlockSettings]) -> dict[str, Any]:
    """The coder, the settings, the device and the share of the command line, by their names in ``encode_split``.

    Args:
        args: of the command line; the layer defaults to the one that the dictionary was learned from.
        blocks_for: the blocks for a coder.
    """
    import torch

    from mlsm_plugin.auxiliary.coder_fit import fitting_layer
    from mlsm_plugin.auxiliary.split_coder import CodingSettings
    from mlsm_plugin.files.work_share import work_share
    from mlsm_plugin.sparse_coding.coder import load_coder

    check_positive(args, "threads", "shard_tokens", "batch_tokens")
    check_coverage(args.coverage)
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {args.seed}")
    share = work_share(args.shard_index, args.num_shards, os.environ)
    coder = load_coder(args.dictionary, **given_coder_options(args))
    settings = CodingSettings(
        layer=fitting_layer(coder, args.layer, folder=args.dictionary, option="--layer"),
        blocks=blocks_for(coder),
        threads=args.threads,
        allow_inexact=args.allow_inexact,
        coverage=args.coverage,
        coverage_seed=args.seed,
        fp16=args.fp16,
        batch_tokens=args.batch_tokens,
        shard_tokens=args.shard_tokens,
        latent_top=args.latent_top,
    )
    device = args.device or share.device(torch.cuda.device_count())
    return {"coder": coder, "settings": settings, "device": device, "share": share}


def _encode(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from mlsm_plugin.auxiliary.block_coding import encode_split

    for split in args.splits:
        start = time.perf_counter()
        figures = encode_split(args.data_bin, split, **options, output=args.output)
        report(split, figures, time.perf_counter() - start, options["share"])
    if figures.meta is not None:
        blocks = options["settings"].blocks
        command = training_command(args.data_bin, "model", blocks, args.user_dir, codes=args.output)
        print_next("Train with", command)
    return 0


def report(split: str, figures: CodingFigures, seconds: float, share: WorkShare) -> None:
    """Print what was coded, and how exactly."""
    if figures.coded_tokens:
        print(
            f"{split}: {figures.coded_tokens} tokens coded in {seconds:.1f} s "
            f"({figures.coded_tokens / seconds:.0f} a second)"
            + (f"; {figures.empty_tokens} codes are empty" if figures.empty_tokens else "")
        )
    if figures.inexact_tokens:
        _warn(
            f"{split}: {figures.inexact_tokens} of {figures.coded_tokens} codes do not reach the required accuracy; "
            "they were written (--allow-inexact)"
        )
    if figures.meta is None:
        print(
            f"{split}: process {share.index} of {share.count} is done; {figures.missing_shards} of "
            f"{figures.num_shards} shards are missing, which belong to other processes; the last process completes "
            "the store (if one failed, run the same command again)"
        )
        return
    if figures.already_complete:
        print(f"{split}: nothing to do, {figures.directory} is complete")
    meta = figures.meta
    size = sum(sum(shard["bytes"].values()) for shard in meta["shards"])
    gaps = f", duality gap mean {meta['gap_mean']:.1e}, max {meta['gap_max']:.1e}" if "gap_mean" in meta else ""
    print(f"  {figures.directory}: {meta['coded_tokens']} tokens, {meta['nnz']} non-zeros, {size / 1e6:.1f} MB{gaps}")


def _estimate(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from mlsm_plugin.auxiliary.block_coding import estimate_split

    estimates = (estimate_split(args.data_bin, split, **options) for split in args.splits)
    return report_estimates(estimates, options["share"], args.allow_inexact, args.output or args.data_bin)


def report_estimates(estimates: Iterable[CodingEstimate], share: WorkShare, allow_inexact: bool, output: str) -> int:
    """Print the estimates as they are made, and the free room of the disk on which ``output`` is, or will be."""
    if share.index != 0:  # only the first process prints the estimate
        return 0
    needed = 0
    for estimate in estimates:
        print(estimate, flush=True)
        needed += estimate.disk_bytes
        if estimate.inexact_tokens and not allow_inexact:
            _warn(
                f"{estimate.split}: {estimate.inexact_tokens} codes of the sample do not reach the required accuracy "
                "(--tolerance) and would be refused; use a larger --tolerance, or --allow-inexact"
            )
    path = Path(output).absolute()
    disk = next(str(folder) for folder in (path, *path.parents) if folder.is_dir())
    free = shutil.disk_usage(disk).free
    print(f"free disk of {disk}: {free / 1e6:.1f} MB, the codes need {needed / 1e6:.1f} MB")
    if needed > free:
        _warn(f"the codes need {needed / 1e9:.2f} GB, but {disk} has only {free / 1e9:.2f} GB free")
    return 0


def _warn(message: str) -> None:
    print(f"mlsm: warning: {message}", file=sys.stderr)
