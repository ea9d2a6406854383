"""``mlsm encode``: sparse-code the hidden states of a dataset."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.cli.coding_options import (
    ITS_LAYER,
    OF_THE_DICTIONARY,
    add_auxiliary,
    add_block_options,
    add_share_options,
    block_settings,
    output_folder,
)
from mlsm_plugin.cli.next_commands import print_next, training_command
from mlsm_plugin.cli.settings_flags import add_coder_flags, add_settings, coder_of, refuse_changed, settings_of
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME
from mlsm_plugin.core.files.process_rank import ProcessRank, process_rank
from mlsm_plugin.core.files.settings import options_of
from mlsm_plugin.core.hidden_states.settings import BlockSettings

if TYPE_CHECKING:
    from mlsm_plugin.core.coding.block_coding import CodingFigures
    from mlsm_plugin.core.sparse_coding.coder import SparseCoder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "Run the same command again to resume a stopped run. Processes that torchrun or srun start share the work; "
        "see docs/encoding.md."
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="dataset that `mlsm binarize` wrote; or sequences of ids with special tokens: one .npy file (n, T), or a "
        "folder of datasets.Dataset.save_to_disk with the column input_ids",
    )
    text = (
        "folder for the codes, <split>.codes (default: DATA), which fairseq-train takes as --latent-codes; for "
        "one file or folder of sequences, the store itself"
    )
    parser.add_argument("--output", type=output_folder, metavar="DIR", help=text)
    parser.add_argument("--tokenizer", metavar="PATH", help="for sequences: tokenizer, if it is not beside the model")
    add_auxiliary(parser)
    parser.add_argument("--dictionary", required=True, metavar="DICT_DIR", help="folder that `mlsm dictionary` wrote")
    parser.add_argument(
        "--splits", nargs="+", metavar="SPLIT", help="splits to code (default: train valid; for sequences: all)"
    )
    add_settings(parser, CodingSettings, defaults=ITS_LAYER)
    add_coder_flags(parser)
    add_share_options(parser)
    add_block_options(parser, OF_THE_DICTIONARY)


def needs_fairseq(args: argparse.Namespace) -> bool:
    """Whether the dataset is for fairseq, rather than sequences of ids."""
    if not Path(args.data).exists():
        raise FileNotFoundError(f"{args.data} does not exist; `mlsm binarize` makes a dataset")
    return (Path(args.data) / DICTIONARY_NAME).exists()


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Code each split, and report the accuracy of the codes."""
    from mlsm_plugin.core.sparse_coding.sparse_coder import torch_threads

    of_fairseq = needs_fairseq(args)
    if of_fairseq and args.tokenizer:
        raise ValueError(f"--tokenizer is only for sequences; {args.data} has its own tokenizer")
    coding = coding_of(args, of_fairseq=of_fairseq)
    work = _splits(args, coding) if of_fairseq else _sequences(args, coding)
    with torch_threads(args.threads):  # as many as the solver, so that the codes do not depend on torch's default
        for name, encode in work:
            figures = encode_and_report(name, encode, coding.process)
    if of_fairseq and figures.meta is not None and Path(args.data, "train.idx").is_file():
        command = training_command(
            args.data, "model", coding.settings, args.auxiliary, args.user_dir, codes=args.output
        )
        print_next("Train with", command)
    return 0


@dataclass(frozen=True)
class Coding:
    """The coder, the settings and the rank of this process."""

    coder: "SparseCoder"
    settings: CodingSettings
    process: ProcessRank


Work = list[tuple[str, "Callable[[], CodingFigures]"]]


def _splits(args: argparse.Namespace, coding: Coding) -> Work:
    """The name of each split of a fairseq dataset, and the function that codes it."""
    from mlsm_plugin.fairseq_plugin.coding.corpus_coding import splits_encoder

    encode = splits_encoder(
        args.data,
        auxiliary=args.auxiliary,
        coder=coding.coder,
        settings=coding.settings,
        process=coding.process,
        output=args.output,
    )
    return [(split, partial(encode, split)) for split in args.splits or ["train", "valid"]]


def _sequences(args: argparse.Namespace, coding: Coding) -> Work:
    """The name of each split of sequences of ids, and the function that codes it."""
    from mlsm_plugin.core.files.hf_files import HF_PREFIX
    from mlsm_plugin.huggingface.coding import encode_sequences

    data = Path(args.data)
    output = Path(args.output or args.data)
    if not args.auxiliary.startswith(HF_PREFIX):
        raise ValueError(f"{data} has no dict.txt and therefore holds sequences, which need a model {HF_PREFIX}PATH")
    splits = args.splits or [split for split in ("train", "valid", "test") if (data / split).is_dir()]
    folders = {split: (data / split, output / f"{split}.codes") for split in splits}
    if not folders and args.output is None:
        raise ValueError(f"--output is required for {data}: the folder of the code store")
    encode = partial(
        encode_sequences,
        model=args.auxiliary,
        coder=coding.coder,
        settings=coding.settings,
        tokenizer=args.tokenizer,
        process=coding.process,
    )
    return [
        (name, partial(encode, tokens, output=store))
        for name, (tokens, store) in (folders or {"sequences": (data, output)}).items()
    ]


def coding_of(args: argparse.Namespace, *, of_fairseq: bool) -> Coding:
    """The coder, the settings and the rank from the command line."""
    import torch

    from mlsm_plugin.core.coding.coder_fit import fitting_layer

    process = process_rank(args.process_index, args.num_processes, os.environ)
    if not of_fairseq:
        refuse_changed(args, dict.fromkeys(options_of(BlockSettings)), "sequences are already cut")
    coder = coder_of(args)
    settings = settings_of(
        CodingSettings,
        args,
        layer=fitting_layer(coder, getattr(args, "layer", None), folder=args.dictionary, option="--layer"),
        # sequences are already blocks
        blocks=block_settings(args, args.auxiliary, coder.meta.get("blocks")) if of_fairseq else BlockSettings(),
        device=args.device or process.device(torch.cuda.device_count()),
    )
    return Coding(coder, settings, process)


def encode_and_report(name: str, encode: "Callable[[], CodingFigures]", process: ProcessRank) -> "CodingFigures":
    """Code a split with ``encode``; print how many tokens were coded, and how accurately."""
    start = time.perf_counter()
    figures = encode()
    seconds = time.perf_counter() - start
    if figures.coded_tokens:
        print(
            f"{name}: {figures.coded_tokens} tokens coded in {seconds:.1f} s "
            f"({figures.coded_tokens / seconds:.0f} a second)"
            + (f"; {figures.empty_tokens} codes are empty" if figures.empty_tokens else "")
        )
    if figures.inexact_tokens:
        print(
            f"mlsm: warning: {name}: {figures.inexact_tokens} of {figures.coded_tokens} codes do not reach the "
            "required accuracy; they were written (--allow-inexact)",
            file=sys.stderr,
        )
    if figures.meta is None:
        print(
            f"{name}: process {process.rank} of {process.world_size} is done; {figures.missing_shards} of "
            f"{figures.num_shards} shards are missing, which belong to other processes; the last process completes "
            "the store (if one failed, run the same command again)"
        )
        return figures
    if figures.already_complete:
        print(f"{name}: nothing to do, {figures.directory} is complete")
    meta = figures.meta
    size = sum(sum(shard["bytes"].values()) for shard in meta["shards"])
    gaps = f", duality gap mean {meta['gap_mean']:.1e}, max {meta['gap_max']:.1e}" if "gap_mean" in meta else ""
    print(f"  {figures.directory}: {meta['coded_tokens']} tokens, {meta['nnz']} non-zeros, {size / 1e6:.1f} MB{gaps}")
    return figures
