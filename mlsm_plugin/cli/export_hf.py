"""``mlsm export-hf``: export a checkpoint to Hugging Face and verify it."""

from __future__ import annotations

import argparse
import itertools

from mlsm_plugin.cli.coding_options import check_positive
from mlsm_plugin.cli.output_folder import output_folder


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
    print(
        f"{args.output}: ids are the same on {proof.lines:,} lines, logits of {proof.tokens:,} tokens differ by at "
        f"most {proof.largest_difference:.1e}"
    )
    if proof.reordered:
        print(f"on {proof.reordered:,} more lines the same pieces come in another order, with equal probability")
    if proof.latent_atoms:
        print(
            f"latent_head.safetensors: the projection to {proof.latent_atoms} atoms, which follows lm_head's layer norm"
        )
    return 0
