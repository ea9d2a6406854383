"""``mlsm encode-hf``: sparse-code the hidden states of a Hugging Face model; needs no fairseq."""

from __future__ import annotations

import argparse
import time

from mlsm_plugin.cli.coding_options import add_model_options
from mlsm_plugin.cli.encode import (
    add_coding_options,
    add_dictionary_options,
    coding_arguments,
    report,
    report_estimates,
)
from mlsm_plugin.cli.output_folder import output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "The store has a row for each token of the sequences, in their order; those of special tokens are empty. Run "
        "the same command again to resume a stopped run. Processes that torchrun or srun start share the work."
    )
    parser.add_argument(
        "tokens",
        metavar="TOKENS",
        help="sequences of ids with special tokens: a folder that `mlsm tokenize-hf` wrote, an .npy file (n, T), or a "
        "folder of datasets.Dataset.save_to_disk with the column input_ids",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="auxiliary model: folder or hub name of a BERT- or RoBERTa-like model"
    )
    parser.add_argument("--output", type=output_folder, required=True, metavar="STORE", help="folder of the code store")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer of the model, if it does not lie beside it")
    add_dictionary_options(parser)
    add_coding_options(parser)
    add_model_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Code the sequences, or estimate the cost, and report how exact the codes are."""
    from mlsm_plugin.hidden_states.blocks import BlockSettings
    from mlsm_plugin.huggingface.coding import encode_sequences, estimate_sequences
    from mlsm_plugin.sparse_coding.sparse_coder import torch_threads

    options = coding_arguments(args, lambda coder: BlockSettings())  # sequences are blocks already
    options["tokenizer"] = args.tokenizer
    with torch_threads(args.threads):
        if args.estimate:
            estimates = (estimate_sequences(tokens, args.model, **options) for tokens in [args.tokens])
            return report_estimates(estimates, options["share"], args.allow_inexact, args.output)
        start = time.perf_counter()
        figures = encode_sequences(args.tokens, args.model, output=args.output, **options)
        report("sequences", figures, time.perf_counter() - start, options["share"])
    return 0
