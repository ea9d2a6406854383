"""``mlsm finetune``: fine-tune a checkpoint to classify texts, or pairs of texts."""

import argparse
from collections.abc import Mapping
from typing import Any

from mlsm_plugin.cli.coding_options import add_checkpoint, add_output, user_dir_flags
from mlsm_plugin.cli.settings_flags import add_settings, settings_of
from mlsm_plugin.evaluation.settings import FinetuneSettings

TAKES_EXTRA_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Every other flag is handed to fairseq-train, e.g. --fp16 or --dropout 0.2. Run the same command again to "
        "resume after a stop."
    )
    columns = "training texts: label TAB text, or label TAB text TAB text; or *.jsonl of GLUE, as in BabyLM"
    add_checkpoint(parser)
    parser.add_argument("--train", required=True, metavar="TSV", help=columns)
    parser.add_argument(
        "--valid", required=True, metavar="TSV", help="validation texts; they decide which epoch is kept"
    )
    parser.add_argument("--test", metavar="TSV", help="test texts; used once, with the kept epoch")
    add_output(parser, "folder for runs, predictions, results.json and the best model")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="N", help="random seeds, a run for each")
    add_settings(parser, FinetuneSettings)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Fine-tune and print the results."""
    from mlsm_plugin.evaluation.finetuning import Finetuning
    from mlsm_plugin.hub import checkpoint_of

    if len(set(args.seeds)) < len(args.seeds):
        raise ValueError(f"--seeds names a seed twice: {' '.join(map(str, args.seeds))}")
    files = {split: getattr(args, split) for split in ("train", "valid", "test") if getattr(args, split)}
    settings = settings_of(FinetuneSettings, args, extra=(*extra, *user_dir_flags(args)))
    finetuning = Finetuning(checkpoint_of(args.checkpoint), files, args.output, settings)
    if not settings.regression:
        for split, texts in finetuning.texts.items():
            print(f"{split}: {len(texts):,} texts with the labels {texts.label_counts()}")
    summary = finetuning.run(args.seeds)
    print(table(summary))
    print(f"{args.output}: predictions of each seed, results.json, and the model of seed {summary['best_seed']}")
    return 0


def table(summary: Mapping[str, Any]) -> str:
    """A table of aligned columns: a row for each seed, then mean and standard deviation."""
    names = list(summary["mean"])
    rows = [["seed", *(name.replace("_", " ") for name in names)]]
    for result in summary["seeds"]:
        rows.append([str(result["seed"]), *(f"{result[name]:.4f}" for name in names)])
    for kind in ("mean", "deviation"):
        rows.append([kind, *(f"{summary[kind][name]:.4f}" for name in names)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
