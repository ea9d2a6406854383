"""``mlsm export-hf``: export a checkpoint to Hugging Face and verify it."""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING

from mlsm_plugin.cli.coding_options import check_positive
from mlsm_plugin.cli.output_folder import output_folder

if TYPE_CHECKING:
    from mlsm_plugin.hub.comparison import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("checkpoint", metavar="DIR", help="folder of a run, or a checkpoint in it")
    parser.add_argument(
        "output", type=output_folder, metavar="OUT", help="folder to write: config, safetensors, fast tokenizer"
    )
    add_comparison(parser)


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Options that choose the text on which two models are compared."""
    parser.add_argument(
        "--text", required=True, metavar="FILE", help="text on which ids and logits of both models are compared"
    )
    parser.add_argument("--lines", type=int, default=1000, metavar="N", help="largest number of lines to compare")


def lines_to_compare(args: argparse.Namespace) -> list[str]:
    """The first of the lines of that text that are not empty."""
    from mlsm_plugin.tokenization.text_files import read_lines

    check_positive(args, "lines")
    return list(itertools.islice((line for line in read_lines(args.text) if line), args.lines))


def print_comparison(output: str, found: Comparison) -> None:
    """Say what the comparison of two models has found."""
    print(
        f"{output}: ids are the same on {found.lines:,} lines, logits of {found.tokens:,} tokens differ by at most "
        f"{found.largest_difference:.1e}"
    )
    if found.reordered:
        print(f"on {found.reordered:,} more lines the same pieces come in another order, with equal probability")
    if found.with_symbols:
        print(
            f"{found.with_symbols:,} of the lines name a special token and were compared as plain text, which "
            "transformers reads with split_special_tokens=True"
        )


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Export, load the result, and compare; fail if something differs."""
    import os

    from mlsm_plugin.hub import from_pretrained

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded
    try:
        import safetensors  # noqa: F401
        import transformers
        from google import protobuf  # noqa: F401
    except ImportError as error:
        raise ValueError(f"mlsm export-hf needs {error.name}: pip install 'mlsm_plugin[hf]'") from None
    from mlsm_plugin.hub.hf_export import export

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = lines_to_compare(args)
    proof = export(from_pretrained(args.checkpoint), args.output, lines)
    print_comparison(args.output, proof)
    if proof.vocabulary:
        print(f"mlsm: warning: other text can get other ids, since {proof.vocabulary}", file=sys.stderr)
    if proof.latent_atoms:
        print(
            f"latent_head.safetensors: the projection to {proof.latent_atoms} atoms, which follows lm_head's layer norm"
        )
    return 0
