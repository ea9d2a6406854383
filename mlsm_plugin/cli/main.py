"""Entry point of ``mlsm``: finds the subcommand, and prints user errors as one line."""

import argparse
import difflib
import importlib
import logging
import os
import sys

import mlsm_plugin
from mlsm_plugin.cli import plugins
from mlsm_plugin.cli.actions import add_described
from mlsm_plugin.core.machine.memory import keep_freed_memory
from mlsm_plugin.core.machine.processors import wait_briefly
from mlsm_plugin.fairseq_plugin.compat import installation
from mlsm_plugin.version import __version__

# command -> one line of help; the module of the same name in this folder has ``add_arguments(parser)`` and
# ``run(args, extra) -> int``; if it can run without fairseq, also ``needs_fairseq(args) -> bool``
COMMANDS = {
    "tokenizer": "train a SentencePiece tokenizer and write its fairseq dict.txt",
    "binarize": "turn raw text into a dataset of ids, for fairseq or for Hugging Face's Trainer",
    "auxiliary": "pre-train the auxiliary masked language model",
    "dictionary": "learn the dictionary of latent properties, or a sparse autoencoder",
    "encode": "sparse-code the auxiliary model's hidden states into a code store",
    "preprocess": "turn raw text into everything that MLSM training reads: tokenizer to encode in one command",
    "pretrain": "pre-train MLSM in stages with the codes of the model itself, without an auxiliary model",
    "adapt": "continue the pre-training of a Hugging Face model, or train a small one from it; needs no fairseq",
    "babylm": "take part in the BabyLM challenge: train, check and push within the limits of a track",
    "inspect": "write an HTML report of what the latent properties mean",
    "convert": "import a model or a dictionary of another program, export one, or average checkpoints",
    "finetune": "fine-tune an encoder to classify texts, with several seeds",
    "evaluate": "compare encoders; judge a masked LM on minimal pairs, or a dictionary",
    "search": "index documents by the properties of their tokens, search them, export the codes; needs no fairseq",
    "explore": "open a local web page on what a model makes of a sentence: its properties, its masks, search results",
    "npm": "retrieve with an NPM model: build a datastore, fill masks, classify texts",
    "infill": "fill the gaps of texts with a denoising model",
    "plot": "draw the curves of runs from fairseq's logs",
    "doctor": "check the installed versions",
}
MAY_DO_WITHOUT_FAIRSEQ = {
    "adapt",
    "binarize",
    "convert",
    "doctor",
    "encode",
    "evaluate",
    "explore",
    "finetune",
    "infill",
    "inspect",
    "search",
}
EXAMPLES = {  # command -> example of its command line
    "tokenizer": "mlsm tokenizer --input train.txt --vocab-size 8000 --output tok",
    "binarize": "mlsm binarize --tokenizer tok --train train.txt --valid valid.txt --output data-bin",
    "auxiliary": "mlsm auxiliary data-bin --save-dir aux --max-update 10000",
    "dictionary": "mlsm dictionary data-bin --auxiliary aux/checkpoint_best.pt --layer 4 --output dict",
    "encode": "mlsm encode data-bin --auxiliary aux/checkpoint_best.pt --dictionary dict",
    "preprocess": "mlsm preprocess --train train.txt --valid valid.txt --output run --vocab-size 8000",
    "pretrain": "mlsm pretrain data-bin --save-dir model --max-update 10000",
    "adapt": "mlsm adapt MODEL --text train.txt --output adapted",
    "babylm": "mlsm babylm train train_10M --track strict-small --output run",
    "inspect": "mlsm inspect run --output report.html",
    "convert": "mlsm convert model exported --text valid.txt",
    "finetune": "mlsm finetune --model MODEL --train train.tsv --valid valid.tsv --output classifier",
    "evaluate": "mlsm evaluate encoder MODEL adapted/model --text held_out.txt",
    "search": "mlsm search index docs.txt --model MODEL --dictionary dict --output index",
    "explore": "mlsm explore MODEL --dictionary dict --index index",
    "npm": "mlsm npm datastore data-bin --checkpoint model --output datastore",
    "infill": "mlsm infill 'The <extra_id_0> of the array.' --checkpoint model",
    "plot": "mlsm plot model --output curves.png",
    "doctor": "mlsm doctor",
}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; only the module of ``command`` is imported, which keeps ``mlsm --help`` fast."""
    parser = argparse.ArgumentParser(
        prog="mlsm", description="Masked-language-model pre-training beyond token identity, from raw text to a model."
    )
    parser.add_argument("--version", action="version", version=f"mlsm_plugin {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = add_described(commands, name, summary)
        subparser.add_argument("--user-dir", metavar="DIR", help=plugins.HELP)
        if name == command:
            module = importlib.import_module(f"mlsm_plugin.cli.{name}")
            subparser.set_defaults(
                run=getattr(module, "run", None),  # if missing, each action has its own
                takes_extra=getattr(module, "TAKES_EXTRA_FLAGS", False),
                needs_fairseq=getattr(module, "needs_fairseq", lambda args: True),
            )
            module.add_arguments(subparser)
        subparser.epilog = f"{subparser.epilog or ''} Example: {EXAMPLES[name]}".strip()
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run ``mlsm``; returns the exit status: 0 for success, 1 for an error, 2 for wrong usage."""
    try:
        return run_command(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("MLSM_TRACEBACK"):
            raise
        advice = "; `mlsm doctor` lists what is missing" if isinstance(error, ImportError) else ""
        _print_last_line(f"mlsm: error: {_one_line(error)}{advice}")
        return 1
    except KeyboardInterrupt:
        _print_last_line("mlsm: interrupted; run the same command again to resume")
        return 130


def run_command(arguments: list[str]) -> int:
    """Run a command; returns its exit status.

    What the command cannot do raises ValueError, OSError or ImportError. Arguments that the parser does not take are
    printed with the usage, and raise SystemExit.
    """
    command = next((word for word in arguments if not word.startswith("-")), None)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    keep_freed_memory()
    wait_briefly()
    if command is not None and command not in COMMANDS:
        print(f"mlsm: error: there is no command {command!r}{_similar(command)}", file=sys.stderr)
        return 2
    if command in COMMANDS and command not in MAY_DO_WITHOUT_FAIRSEQ:
        _check_fairseq()
    if command in COMMANDS and (user_dir := plugins.user_dir_of(arguments)) is not None:
        mlsm_plugin.register()  # does nothing without fairseq
        plugins.import_plugin(user_dir)
    parser = build_parser(command)
    args, extra = parser.parse_known_args(arguments)
    if extra and not args.takes_extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    if args.needs_fairseq(args):
        _check_fairseq()
        mlsm_plugin.register()
    return int(args.run(args, extra) or 0)


def _similar(command: str) -> str:
    """The end of an error message: the most similar command, and how to list all commands."""
    similar = difflib.get_close_matches(command, COMMANDS, n=1)
    guess = f", did you mean `mlsm {similar[0]}`?" if similar else ";"
    return f"{guess} `mlsm --help` lists all"


def _check_fairseq() -> None:
    if problem := installation.fairseq_problem():
        raise ValueError(problem)


def _print_last_line(text: str) -> None:
    from mlsm_plugin.core.files.progress import close_bars  # tqdm would make --help slower

    close_bars()
    print(text, file=sys.stderr)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
