"""``mlsm babylm``: from the text of the BabyLM challenge to a submission."""

import argparse
import sys
from pathlib import Path

from mlsm_plugin.babylm.settings import BabylmSettings
from mlsm_plugin.cli.actions import actions_of, add_push_options
from mlsm_plugin.cli.coding_options import (
    add_arch,
    add_block_options,
    add_output,
    add_workers,
    block_settings,
    user_dir_flags,
)
from mlsm_plugin.cli.settings_flags import add_settings, refuse_changed, settings_of
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.files.settings import options_of
from mlsm_plugin.core.hidden_states.settings import BlockSettings, ModelRun
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings

OF_CODES = ("atoms", "k", "tokens", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/babylm.md describes all steps, with the commands of the evaluation pipeline."
    add = actions_of(parser)
    add_train_options(
        add("train", "train within the limits of a track, and save models at given numbers of words", run_train)
    )
    check = add("check", "check names, counts, limits and cards, and that transformers reads each model", run_check)
    push = add("push", "push the models to the branches of a repository of the Hugging Face hub", run_push)
    for action in (check, push):
        action.add_argument("run_folder", metavar="RUN", type=Path, help="folder that `mlsm babylm train` wrote")
    push.add_argument(
        "repository", metavar="OWNER/NAME", help="repository, without a dot; created if it does not exist"
    )
    add_push_options(push)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(takes_extra=True)
    parser.epilog = (
        "Every other flag is handed to fairseq-train, as in `mlsm auxiliary`: --batch-size, --lr, --cpu, ... Run the "
        "same command again to resume a stopped run; under torchrun, all processes train."
    )
    text = "folder with the text: all its *.train.txt or *.train, or else its *.txt; they may be compressed"
    parser.add_argument("text_dir", metavar="TEXT_DIR", help=text)
    add_output(parser, "folder of the run: dataset, model, ledger, and the exported checkpoints")
    add_settings(parser, BabylmSettings)
    add_arch(parser, default="mlsm_deberta_small")  # this model learns most from each word: docs/speed.md
    add_settings(parser, TokenizerSettings, only=("vocab_size",), defaults={"vocab_size": 16_000})
    add_workers(parser)
    add_settings(parser.add_argument_group("dictionary and codes of mlsm+mlm"), LearningSettings, only=OF_CODES)
    add_settings(parser, ModelRun)
    add_block_options(parser, default=str(BlockSettings().tokens_per_sample))


def run_train(args: argparse.Namespace, extra: list[str]) -> int:
    """Run the missing steps of the training, and print the ledger."""
    from mlsm_plugin.babylm.training import train

    settings = settings_of(BabylmSettings, args)
    if settings.objective != "mlsm+mlm":
        unused = {name: options_of(LearningSettings)[name].default for name in OF_CODES if name != "seed"}
        refuse_changed(args, unused, "only --objective mlsm+mlm makes codes")
    result = train(
        args.text_dir,
        args.output,
        settings,
        settings_of(TokenizerSettings, args),
        settings_of(LearningSettings, args, layer=0, coder="topk"),
        block_settings(args, "", {"tokens_per_sample": BlockSettings().tokens_per_sample}),
        arch=args.arch,
        flags=[*extra, *user_dir_flags(args)],
        workers=args.workers,
    )
    if result is None:  # only the first rank prints
        return 0
    ledger, early_end = result
    print(f"\n{ledger.table()}")
    print(early_end or f"\nthe run is complete; check it with: mlsm babylm check {args.output}")
    return 0


def run_check(args: argparse.Namespace, extra: list[str]) -> int:
    """Print the ledger, and the problems."""
    from mlsm_plugin.babylm.checks import problems_of
    from mlsm_plugin.babylm.ledger import Ledger
    from mlsm_plugin.core.files.hf_files import import_transformers

    print(Ledger.read(args.run_folder).table())
    problems = problems_of(args.run_folder)
    for problem in problems:
        print(f"mlsm: error: {problem}", file=sys.stderr)
    if not problems:
        print(f"all checks passed with transformers {import_transformers().__version__}")
    return 1 if problems else 0


def run_push(args: argparse.Namespace, extra: list[str]) -> int:
    """Push the files that the repository lacks; prints a line for each branch."""
    from mlsm_plugin.babylm.publishing import push

    for line in push(args.run_folder, args.repository, private=args.private, dry_run=args.dry_run):
        print(line, flush=True)
    return 0
