"""``mlsm import-hf``: turn a ModernBERT of Hugging Face into a checkpoint that training starts from."""

from __future__ import annotations

import argparse
import shlex

from mlsm_plugin.cli.export_hf import add_comparison, lines_to_compare, print_comparison
from mlsm_plugin.cli.output_folder import output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "model", metavar="PATH", help="a ModernBertForMaskedLM: folder or hub name, with or without hf: before it"
    )
    parser.add_argument(
        "output", type=output_folder, metavar="DIR", help="new folder to write: model.pt, dict.txt, tokenizer"
    )
    add_comparison(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Import, load the result, and compare; fail if something differs. Then print the next command."""
    from mlsm_plugin.cli.next_commands import print_next
    from mlsm_plugin.fairseq_seams.version_shims import PACKAGE_DIR
    from mlsm_plugin.hub.modernbert_import import CHECKPOINT, OBJECTIVE, import_modernbert

    lines = lines_to_compare(args)
    proof = import_modernbert(args.model, args.output, lines)
    print_comparison(args.output, proof)
    words = ["fairseq-train", "DATA_BIN", "--user-dir", args.user_dir or PACKAGE_DIR, *OBJECTIVE, *proof.flags]
    words += ["--finetune-from-model", f"{args.output}/{CHECKPOINT}"]
    print_next(
        f"Train it further on a dataset that `mlsm binarize --tokenizer {args.output}` wrote (add the optimizer)",
        shlex.join(words),
    )
    return 0
