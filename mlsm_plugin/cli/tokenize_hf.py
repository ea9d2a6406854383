"""``mlsm tokenize-hf``: raw text to sequences of ids of a Hugging Face tokenizer; needs no fairseq."""

from __future__ import annotations

import argparse
import shlex

from mlsm_plugin.cli.coding_options import add_max_unk_rate
from mlsm_plugin.cli.next_commands import print_next
from mlsm_plugin.cli.output_folder import output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "Lines are packed into sequences, whole where they fit, with the tokenizer's special tokens around each. No "
        "sequence crosses a blank line, which ends a document."
    )
    parser.add_argument(
        "texts", nargs="+", metavar="TEXT", help="text file, one sentence a line; may be .gz, .bz2, .xz"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="MODEL", help="folder or hub name of the tokenizer, or of its model"
    )
    parser.add_argument("--output", type=output_folder, required=True, metavar="DIR", help="folder for the sequences")
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="ids of the longest sequence, special tokens included (default: what the model can take, at most 512)",
    )
    add_max_unk_rate(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace other sequences that are already there")


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Tokenize and pack, unless it is already done."""
    from mlsm_plugin.files.hf_files import HF_PREFIX
    from mlsm_plugin.huggingface.text_sequences import write_text_sequences

    sequences, made = write_text_sequences(
        *(args.texts, args.tokenizer, args.output),
        max_length=args.max_length, max_unk_rate=args.max_unk_rate, overwrite=args.overwrite,
    )  # fmt: skip
    if not made:
        print(f"nothing to do, {args.output} is complete")
    print(f"{args.output}: {len(sequences):,} sequences, {sequences.num_tokens:,} tokens")
    words = ["mlsm", "encode-hf", args.output, args.tokenizer.removeprefix(HF_PREFIX), "--dictionary", "DICT_DIR"]
    print_next("Code them with", shlex.join([*words, "--output", "STORE"]))
    return 0
