"""``mlsm auxiliary``: pre-train the auxiliary masked language model."""

import argparse

from mlsm_plugin.cli.coding_options import add_keep_at, add_run, check_positive, kept_percentages, user_dir_flags

TAKES_EXTRA_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Every other flag is handed to fairseq-train, e.g. --tokens-per-sample 128 --batch-size 64, "
        "--restore-file to continue from a checkpoint, --finetune-from-model to start from one with a fresh optimizer. "
        "Matrix products are in bfloat16 where the machine is fast in it (--autocast off: in float32). Run the same "
        "command again to resume a stopped run."
    )
    add_run(parser)
    add_keep_at(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Train, and list the kept checkpoints."""
    from mlsm_plugin.fairseq_plugin.pipelines.pretraining import pretrain, separate_words

    check_positive(args, "max_update")
    flags = [*separate_words(extra), *user_dir_flags(args)]
    checkpoints = pretrain(
        args.data_bin,
        args.save_dir,
        arch=args.arch,
        max_update=args.max_update,
        flags=flags,
        keep_at=kept_percentages(args),
    )
    print("checkpoints kept:", *checkpoints, sep="\n  ")
    return 0
