"""Entry point of ``mlsm``: finds the subcommand, and prints user errors as one line."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys

import mlsm_plugin
from mlsm_plugin.cli import plugins
from mlsm_plugin.fairseq_seams import installation

# subcommand -> one line of help; the module of the same name in this folder (with _ for -) holds
# ``add_arguments(parser)`` and ``run(args, extra) -> int``.
COMMANDS = {
    "tokenizer": "train a SentencePiece tokenizer and write its fairseq dict.txt",
    "binarize": "turn raw text into a binarized dataset that fairseq tasks load",
    "auxiliary": "pre-train the auxiliary masked language model",
    "dictionary": "learn (or import) the dictionary of latent properties",
    "convert-dictionary": "bring in a dictionary or sparse autoencoder of another program, or export one",
    "encode": "sparse-code the auxiliary model's hidden states into a code store",
    "preprocess": "turn raw text into everything that MLSM training reads: tokenizer to encode in one command",
    "pretrain": "pre-train MLSM in stages with the codes of the model itself, without an auxiliary model",
    "tokenize-hf": "turn raw text into sequences of ids of a Hugging Face tokenizer; needs no fairseq",
    "encode-hf": "sparse-code a Hugging Face model's hidden states of sequences of ids; needs no fairseq",
    "adapt": "continue the pre-training of a Hugging Face model on a text, in one command; needs no fairseq",
    "evaluate-dictionary": "judge a dictionary: its reconstructions, and what a masked LM loses by them",
    "inspect": "write an HTML report of what the latent properties mean",
    "datastore": "build a datastore of a corpus, for retrieval with an NPM model",
    "fill": "fill masks with phrases of a datastore",
    "classify": "classify texts zero-shot, by retrieval or by the masked-LM head",
    "finetune": "fine-tune a checkpoint to classify texts, with several seeds",
    "evaluate-pairs": "measure the accuracy of a masked LM on minimal pairs (BLiMP)",
    "infill": "fill the gaps of texts with a denoising model",
    "export-hf": "export to Hugging Face (stock RobertaForMaskedLM or ModernBertForMaskedLM) and verify",
    "import-hf": "import a ModernBERT of Hugging Face, to train it further, and verify",
    "average": "average the weights of checkpoints of a run",
    "plot": "draw the curves of runs from fairseq's logs",
    "doctor": "check the installed versions",
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds a default to the help of an option that has one and does not describe it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []) or "(default" in (action.help or ""):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; only the module of ``command`` is imported, so that ``mlsm --help`` is instant."""
    parser = argparse.ArgumentParser(
        prog="mlsm",
        description="Masked-language-model pre-training beyond token identity, from raw text to a model.",
    )
    parser.add_argument("--version", action="version", version=f"mlsm_plugin {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        subparser.add_argument("--user-dir", metavar="DIR", help=plugins.HELP)
        if name == command:
            module = importlib.import_module(f"mlsm_plugin.cli.{name.replace('-', '_')}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, takes_extra=getattr(module, "TAKES_EXTRA_FLAGS", False))
    return parser


def _version() -> str:
    from mlsm_plugin.version import __version__

    return __version__


def main(argv: list[str] | None = None) -> int:
    """Run ``mlsm``; returns the exit status: 0 for success, 1 for an error, 2 for wrong usage."""
    arguments = sys.argv[1:] if argv is None else argv
    command = next((word for word in arguments if not word.startswith("-")), None)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    needs_fairseq = command in COMMANDS and command not in ("doctor", *installation.WITHOUT_FAIRSEQ)
    if needs_fairseq and (problem := installation.fairseq_problem()):
        print(f"mlsm: error: {problem}", file=sys.stderr)
        return 1
    try:
        if command in COMMANDS and (user_dir := plugins.user_dir_of(arguments)) is not None:
            mlsm_plugin.register()
            plugins.import_plugin(user_dir)
        parser = build_parser(command)
        args, extra = parser.parse_known_args(arguments)
        if extra and not args.takes_extra:
            parser.error(f"unrecognized arguments: {' '.join(extra)}")
        if needs_fairseq:
            mlsm_plugin.register()
        return int(args.run(args, extra) or 0)
    except (ValueError, OSError) as error:
        if os.environ.get("MLSM_TRACEBACK"):
            raise
        print(f"mlsm: error: {_one_line(error)}", file=sys.stderr)
        return 1
    except ImportError as error:
        if os.environ.get("MLSM_TRACEBACK"):
            raise
        print(f"mlsm: error: {_one_line(error)}; `mlsm doctor` lists what is missing", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mlsm: interrupted; run the same command again to resume", file=sys.stderr)
        return 130


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return what
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
