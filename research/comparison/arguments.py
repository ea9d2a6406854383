"""The command line of ``research/compare_objectives.py``."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from comparison.measures import Task
from comparison.rows import CODERS, ROWS, SELF, ordered
from mlsm_plugin.evaluation.masked_batches import MASKED_SHARE

FILES = ("train", "valid", "held_out", "pairs", "tasks", "auxiliary", "output")  # arguments that are paths


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def positive_real(text: str) -> float:
    """Read a finite number above 0."""
    number = float(text)
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def proportion(text: str) -> float:
    """Read a number between 0 and 1."""
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def percentage(most: int) -> Callable[[str], int]:
    """A function that reads a whole number from 1 to ``most``."""

    def read(text: str) -> int:
        number = int(text)
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from 1 to {most}")
        return number

    return read


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line, and check as much as possible before anything runs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _add_files(parser)
    _add_numbers(parser)
    _add_codes(parser)
    _add_training(parser)
    args = parser.parse_args()
    args.objectives = ordered(["mlm", *args.objectives])
    problem = _problem_with(args)
    if problem:
        parser.error(problem)
    args.auxiliary_size = args.auxiliary_size or [args.layers, args.width, args.heads]
    return args


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help="training text")
    parser.add_argument("--valid", nargs="+", required=True, metavar="FILE", help="validation text, of another source")
    parser.add_argument("--held-out", nargs="+", required=True, metavar="FILE", help="text of the training sources")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for all files")
    parser.add_argument("--objectives", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW",
                        help=f"rows to compare: {', '.join(ROWS)} (default: all)")  # fmt: skip
    parser.add_argument(
        "--task", dest="tasks", action="append", default=[], type=Task.parse, metavar="NAME=TRAIN.tsv,TEST.tsv",
        help="texts (label TAB text) to fine-tune on and to probe; may be given several times",
    )  # fmt: skip
    parser.add_argument("--pairs", nargs="+", default=[], metavar="JSONL", help="minimal pairs in BLiMP's format")


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    numbers = {
        "vocab-size": (8000, "pieces of the tokenizer"), "layers": (4, "layers of every model"),
        "width": (256, "width of every model"), "heads": (4, "attention heads of every model"),
        "updates": (7000, "updates of plain masked LM, whose cost is the budget of each row"),
        "search-updates": (1500, "updates of a run that searches the learning rate"),
        "batch-size": (32, "blocks in an update"), "tokens-per-sample": (128, "tokens in a block"),
        "group-size": (16, "blocks in a group of NPM"), "atoms": (3000, "atoms of the dictionaries"),
        "k": (32, "active latents of an autoencoder"),
        "dictionary-tokens": (300_000, "hidden states to learn a dictionary from"),
        "labelled": (2000, "training lines of each classification set"), "finetune-epochs": (3, "of fine-tuning"),
        "threads": (1, "threads of each run"),
    }  # fmt: skip
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"{text} ({default})")


def _add_codes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coder", default="topk", choices=CODERS, help="coder of MLSM's codes (default: topk)")
    parser.add_argument("--auxiliary", metavar="PT", help="a ready auxiliary model, whose cost does not count")
    parser.add_argument("--auxiliary-size", nargs=3, type=positive, metavar=("LAYERS", "WIDTH", "HEADS"),
                        help="of the auxiliary model (default: that of every model)")  # fmt: skip
    parser.add_argument("--layer", type=positive, metavar="L", help="hidden state to code (default: the last)")
    parser.add_argument(
        "--share", type=percentage(90), default=20, metavar="PERCENT",
        help="of the budget for the auxiliary model, of the updates for the first stage of self (20)",
    )  # fmt: skip
    parser.add_argument("--latent-weight", type=positive_real, default=1.0, metavar="W", help="weight of the KL (1)")
    parser.add_argument(
        "--latent-until", type=percentage(100), default=100, metavar="PERCENT",
        help="of the updates: there the weight of the KL is 0, and masked LM follows; 100: the weight stays (100)",
    )  # fmt: skip
    parser.add_argument(
        "--latent-source", default="store", choices=["store", "online"],
        help="mlsm+mlm, self, mlsm: code the dataset once, or the masked tokens in every update (store)",
    )  # fmt: skip


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="mlsm_modern", help="architecture (default: mlsm_modern)")
    parser.add_argument(
        "--mask-prob", type=proportion, default=MASKED_SHARE, metavar="P",
        help=f"share of the tokens to mask in training, but for npm; validation masks {MASKED_SHARE} ({MASKED_SHARE})",
    )  # fmt: skip
    parser.add_argument("--rates", nargs="+", type=positive_real, default=[1e-3, 2e-3, 3e-3], metavar="LR",
                        help="learning rates to choose from (0.001 0.002 0.003)")  # fmt: skip
    parser.add_argument("--finetune-lr", type=positive_real, default=5e-4, metavar="LR", help="of fine-tuning (0.0005)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="of pre-training (1 2 3)")
    parser.add_argument("--finetune-seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N",
                        help="of fine-tuning (1 2 3)")  # fmt: skip
    parser.add_argument("--fairseq-flags", default="", metavar="TEXT", help="more flags for every fairseq-train")


def _problem_with(args: argparse.Namespace) -> str | None:
    """An error message about the arguments, or None."""
    named = {
        "--seeds": args.seeds, "--finetune-seeds": args.finetune_seeds, "--rates": args.rates,
        "--task": [task.name for task in args.tasks], "--pairs": [Path(file).stem for file in args.pairs],
    }  # fmt: skip
    for option, values in named.items():
        twice = [value for value, times in Counter(values).items() if times > 1]
        if twice:
            return f"{option} has {twice[0]} twice"
    if args.coder != "lasso" and args.k > args.atoms:
        return f"--k {args.k} is above {args.atoms}, the number of atoms"
    if args.output.exists() and not args.output.is_dir():
        return f"--output {args.output} is not a folder"
    if args.batch_size % args.group_size:
        return f"--batch-size {args.batch_size} is not a multiple of --group-size {args.group_size}"
    size = [args.layers, args.width, args.heads]
    of_auxiliary = args.auxiliary_size or size
    for _, width, heads in (size, of_auxiliary):
        if width % heads:
            return f"a width of {width} is not a multiple of {heads} heads"
    if args.auxiliary and args.auxiliary_size:
        return "--auxiliary is a model that is ready; leave out --auxiliary-size"
    fewest = min(args.layers, of_auxiliary[0])
    if args.layer and not args.auxiliary and args.layer > fewest:
        return f"--layer {args.layer} is above {fewest}, the layers of the model to code"
    if len(args.rates) > 1:
        for name in args.objectives:
            if ROWS[name].rate_of not in (None, *args.objectives):
                return f"{name} has the rate of {ROWS[name].rate_of}: name both in --objectives, or give one of --rates"
    if SELF not in args.objectives:
        return None
    if of_auxiliary[:2] != size[:2] and args.latent_source == "store":
        return f"--auxiliary-size differs from that of the models, so {SELF} needs --latent-source online"
    if args.latent_until <= args.share:
        return f"--latent-until {args.latent_until} is not after --share {args.share}, where {SELF} has codes"
    return None
