"""``mlsm finetune``: fine-tune an encoder to classify texts, or pairs of texts."""

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from mlsm_plugin.cli.coding_options import add_output
from mlsm_plugin.cli.next_commands import print_next
from mlsm_plugin.cli.settings_flags import add_settings, settings_of
from mlsm_plugin.evaluation.settings import FinetuneSettings

TAKES_EXTRA_FLAGS = True  # to name the replacements of fairseq-train's flags, which once worked here
REPLACEMENTS = {
    "--fp16": "--bf16 on",
    "--memory-efficient-fp16": "--bf16 on",
    "--memory-efficient-bf16": "--bf16 on",
    "--autocast": "--bf16 on",
    "--attention-dropout": "--dropout",
    "--activation-dropout": "--dropout",
    "--pooler-dropout": "--dropout",
    "--max-update": "--max-epoch",
    "--total-num-update": "--max-epoch",
    "--max-sentences": "--batch-size",
    "--update-freq": "--batch-size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.epilog = "Run the same command again to resume after a stop."
    parser.add_argument(
        "--model",
        "--checkpoint",
        required=True,
        metavar="MODEL",
        help="folder of a Hugging Face encoder, or hf: and its hub name; or a fairseq checkpoint, or its folder",
    )
    columns = "training texts: label TAB text, or label TAB text TAB text; or *.jsonl of GLUE, as in BabyLM"
    parser.add_argument("--train", required=True, metavar="TSV", help=columns)
    parser.add_argument(
        "--valid", required=True, metavar="TSV", help="validation texts; they decide which epoch is kept"
    )
    parser.add_argument("--test", metavar="TSV", help="test texts; used once, with the kept epoch")
    add_output(parser, "folder for runs, predictions, results.json and the best model")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="N", help="random seeds; one run for each")
    add_settings(parser, FinetuneSettings)


def needs_fairseq(args: argparse.Namespace) -> bool:
    """True only for a fairseq checkpoint."""
    from mlsm_plugin.evaluation.sentence_encoders import is_hugging_face_encoder

    return not is_hugging_face_encoder(args.model)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Fine-tune and print the results."""
    from mlsm_plugin.evaluation.finetuning import MODEL, Finetuning

    refuse_extra(extra)
    if len(set(args.seeds)) < len(args.seeds):
        raise ValueError(f"--seeds names a seed twice: {' '.join(map(str, args.seeds))}")
    if needs_fairseq(args):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    files = {split: getattr(args, split) for split in ("train", "valid", "test") if getattr(args, split)}
    settings = settings_of(FinetuneSettings, args)
    finetuning = Finetuning(args.model, files, args.output, settings)
    if not settings.regression:
        for split, texts in finetuning.texts.items():
            print(f"{split}: {len(texts):,} texts with the labels {texts.label_counts()}")
    summary = finetuning.run(args.seeds)
    print(table(summary))
    print(f"{args.output}: predictions of each seed, results.json, and the model of seed {summary['best_seed']}")
    path = json.dumps(f"{args.output}/{MODEL}", ensure_ascii=False)  # also a valid Python literal
    code = f'from transformers import pipeline; print(pipeline("text-classification", {path})("a text"))'
    print_next("Use it with", shlex.join(["python", "-c", code]))
    return 0


def refuse_extra(words: Sequence[str]) -> None:
    """Raise ValueError if there are unknown flags; the message names the replacement of a flag of fairseq-train."""
    if not words:
        return
    flag = words[0].partition("=")[0]
    replacement = REPLACEMENTS.get(flag)
    advice = "`mlsm finetune --help` lists all options" if replacement is None else f"pass {replacement}"
    raise ValueError(f"{flag} is not an option: flags are no longer handed to fairseq-train; {advice}")


def table(summary: Mapping[str, Any]) -> str:
    """A table of aligned columns: a row for each seed, then the mean and the standard deviation."""
    names = list(summary["mean"])
    rows = [["seed", *(name.replace("_", " ") for name in names)]]
    for result in summary["seeds"]:
        rows.append([str(result["seed"]), *(f"{result[name]:.4f}" for name in names)])
    for kind in ("mean", "deviation"):
        rows.append([kind, *(f"{summary[kind][name]:.4f}" for name in names)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
