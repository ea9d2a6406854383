"""``mlsm finetune``: fine-tune a checkpoint to classify texts, or pairs of texts."""

from __future__ import annotations

import argparse
from typing import Any

from mlsm_plugin.cli.coding_options import add_max_unk_rate, check_positive
from mlsm_plugin.cli.output_folder import output_folder

TAKES_EXTRA_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = (
        "Every other flag is handed to fairseq-train, e.g. --fp16 or --dropout 0.2. Run the same command again to "
        "resume after a stop."
    )
    columns = "training texts; lines are: label TAB text, or label TAB text TAB text"
    parser.add_argument("--checkpoint", required=True, metavar="PT", help="checkpoint of the model, or its folder")
    parser.add_argument("--train", required=True, metavar="TSV", help=columns)
    parser.add_argument(
        "--valid", required=True, metavar="TSV", help="validation texts; they decide which epoch is kept"
    )
    parser.add_argument("--test", metavar="TSV", help="test texts; used once, with the kept epoch")
    parser.add_argument(
        "--output",
        type=output_folder,
        required=True,
        metavar="DIR",
        help="folder for runs, predictions, results.json and the best model",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="N", help="random seeds, a run for each")
    parser.add_argument("--max-epoch", type=int, default=10, metavar="N", help="largest number of epochs")
    parser.add_argument(
        "--patience", type=int, default=3, metavar="N", help="stop after this many epochs without a better result"
    )
    parser.add_argument("--lr", type=float, default=1e-4, help="peak learning rate")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts in an update")
    parser.add_argument(
        "--header", action="store_true", help="skip the first line of each file, which names its columns"
    )
    parser.add_argument(
        "--allow-single-labels", action="store_true", help="accept a label that only one training text has"
    )
    add_max_unk_rate(parser, of="a file")
    parser.add_argument("--regression", action="store_true", help="predict numbers; all labels must be numbers")
    parser.add_argument(
        "--from-scratch", action="store_true", help="start from random weights of the same architecture, for comparison"
    )


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Fine-tune and print the results."""
    from mlsm_plugin.evaluation.finetuning import FinetuneSettings, Finetuning
    from mlsm_plugin.hub import checkpoint_of
    from mlsm_plugin.tokenization.unknown_tokens import check_max_unk_rate

    check_positive(args, "max_epoch", "patience", "lr", "batch_size")
    check_max_unk_rate(args.max_unk_rate)
    if len(set(args.seeds)) < len(args.seeds):
        raise ValueError(f"--seeds names a seed twice: {' '.join(map(str, args.seeds))}")
    files = {split: getattr(args, split) for split in ("train", "valid", "test") if getattr(args, split)}
    settings = FinetuneSettings(
        max_epoch=args.max_epoch,
        patience=args.patience,
        lr=args.lr,
        batch_size=args.batch_size,
        regression=args.regression,
        header=args.header,
        allow_single_labels=args.allow_single_labels,
        max_unk_rate=args.max_unk_rate,
        from_scratch=args.from_scratch,
        extra=(*extra, "--user-dir", args.user_dir) if args.user_dir else tuple(extra),
    )
    summary = Finetuning(checkpoint_of(args.checkpoint), files, args.output, settings).run(args.seeds)
    print(table(summary))
    print(f"{args.output}: predictions of each seed, results.json, and the model of seed {summary['best_seed']}")
    return 0


def table(summary: dict[str, Any]) -> str:
    """A table of aligned columns: a row for each seed, then mean and standard deviation."""
    names = list(summary["mean"])
    rows = [["seed", *(name.replace("_", " ") for name in names)]]
    for result in summary["seeds"]:
        rows.append([str(result["seed"]), *(f"{result[name]:.4f}" for name in names)])
    for kind in ("mean", "deviation"):
        rows.append([kind, *(f"{summary[kind][name]:.4f}" for name in names)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
