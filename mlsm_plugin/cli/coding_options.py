"""Options that several commands share."""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlsm_plugin.cli.settings_flags import Depends, Parser, add_settings, settings_of
from mlsm_plugin.core.files.settings import options_of
from mlsm_plugin.core.hidden_states.settings import BlockSettings

OF_THE_DICTIONARY = "what the dictionary was learned with"
ITS_LAYER = {"layer": Depends("the one that the dictionary was learned from")}
# the fields of LearningSettings that are options of commands with several steps
OF_LEARNING = ("coder", "atoms", "lambda_", "iterations", "k", "matryoshka", "tokens", "seed")
OF_THE_MODEL = "what the model can take, at most 512"


def output_folder(text: str) -> str:
    """The name of a folder, which need not exist yet.

    OSError if the name is empty, or the folder or a folder above it is a file. argparse does not catch this error, so
    it ends the command early.
    """
    if not text:
        raise FileNotFoundError("the name of the folder to write to is empty")
    for path in (Path(text), *Path(text).absolute().parents):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{path} exists and is not a folder; choose another name")
    return text


def add_output(parser: Parser, help: str) -> None:
    """Add the folder that a command writes."""
    parser.add_argument("--output", type=output_folder, required=True, metavar="DIR", help=help)


def add_auxiliary(parser: Parser) -> None:
    """Add the option for the model whose hidden states are read."""
    text = (
        "auxiliary model: a fairseq checkpoint with the vocabulary of the text, or hf:PATH, the folder or hub name of "
        "a BERT- or RoBERTa-like Hugging Face model, for text that any tokenizer has binarized"
    )
    parser.add_argument("--auxiliary", required=True, metavar="MODEL", help=text)


def add_checkpoint(
    parser: Parser,
    *,
    nargs: str | None = None,
    metavar: str = "PT",
    help: str = "checkpoint of the model, or its folder",
) -> None:
    """Add the option for a fairseq model."""
    parser.add_argument("--checkpoint", required=True, nargs=nargs, metavar=metavar, help=help)


def add_device(parser: Parser) -> None:
    """Add the option for the device of a model, for commands without other options of ``ModelRun``."""
    parser.add_argument("--device", help="torch device (default: the GPU if there is one)")


def add_data(parser: Parser, help: str) -> None:
    """Add the binarized dataset that a command reads."""
    parser.add_argument("data_bin", metavar="DATA_BIN", help=help)


def add_texts(parser: Parser, *, valid: bool = False) -> None:
    """Add the texts of the splits; with ``valid``, validation text is required."""
    text = "training text: UTF-8, plain or .gz, .bz2, .xz, one sentence a line, blank lines between documents"
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help=text)
    parser.add_argument("--valid", nargs="+", required=valid, default=[], metavar="FILE", help="validation text")
    parser.add_argument("--test", nargs="+", default=[], metavar="FILE", help="test text")


def add_workers(parser: Parser) -> None:
    """Add the number of processes that tokenize."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = "number of processes that tokenize; the output does not depend on it"
    parser.add_argument("--workers", type=int, default=cores, metavar="N", help=text)


def add_run(parser: Parser) -> None:
    """Add the options for the datasets, folder, architecture and updates of a pre-training run."""
    parser.add_argument(
        "data_bin",
        metavar="DATA_BIN",
        help="binarized dataset that `mlsm binarize` wrote, or several with one vocabulary, joined by colons; the "
        "epochs alternate between them, and the first also has the validation split",
    )
    parser.add_argument(
        "--save-dir", type=output_folder, required=True, metavar="DIR", help="folder for the checkpoints"
    )
    add_arch(parser)
    parser.add_argument("--max-update", type=int, default=100_000, metavar="N", help="number of updates")


def add_arch(parser: Parser, default: str | None = None) -> None:
    """Add the architecture of the model to pre-train."""
    parser.add_argument(
        "--arch",
        default=default,
        help="fairseq architecture: mlsm_modern_tiny, _small, _medium, _base, mlsm_deberta_tiny, ... (default: "
        f"{default or 'mlsm_modern_small, or that of the run in DIR'})",
    )


def add_keep_at(parser: Parser) -> None:
    """Add the option for which checkpoints of the auxiliary model are kept."""
    text = (
        "percentages of the updates after which a checkpoint is kept; a partially trained model can be useful, too "
        "(default: 10 25 50 100; the one after the last update is always kept). A run that ends earlier, by "
        "--patience or --max-epoch, keeps only those that it reached, and checkpoint_best.pt and checkpoint_last.pt"
    )
    parser.add_argument("--keep-at", nargs="+", type=int, metavar="PERCENT", help=text)


def kept_percentages(args: argparse.Namespace) -> Sequence[int]:
    """The percentages of the updates after which a checkpoint is kept; ValueError if one is not a percentage."""
    from mlsm_plugin.fairseq_plugin.pipelines.pretraining import KEPT_PERCENTAGES

    percentages: Sequence[int] = args.keep_at or KEPT_PERCENTAGES
    if not all(1 <= percentage <= 100 for percentage in percentages):
        raise ValueError(f"--keep-at takes percentages from 1 to 100, got {' '.join(map(str, percentages))}")
    return percentages


def add_block_options(parser: Parser, default: str = OF_THE_MODEL) -> None:
    """Add the options for cutting text into blocks; ``default`` describes the default length in the help."""
    mode = f"{default}, or else complete" if default == OF_THE_DICTIONARY else "complete"
    defaults = {"tokens_per_sample": Depends(default), "sample_break_mode": Depends(mode)}
    add_settings(parser, BlockSettings, defaults=defaults)


def block_settings(args: argparse.Namespace, model: str, learned: Mapping[str, object] | None = None) -> BlockSettings:
    """The block settings from the command line.

    Args:
        args: parsed arguments; options of :func:`add_block_options` that the command line does not set are missing.
        model: name of the model; its length is the default if nothing else sets it.
        learned: the block settings that a dictionary was learned with; they take precedence over the model.
    """
    from mlsm_plugin.core.hidden_states.sources import default_tokens_per_sample

    values = dict(learned or {})
    values |= {name: value for name, value in vars(args).items() if name in options_of(BlockSettings)}
    if "tokens_per_sample" not in values:
        values["tokens_per_sample"] = default_tokens_per_sample(model)
    return settings_of(BlockSettings, argparse.Namespace(**values))


def user_dir_flags(args: argparse.Namespace) -> list[str]:
    """The flag that passes the folder of the user's plugin on to another command."""
    return ["--user-dir", args.user_dir] if args.user_dir else []


def add_share_options(parser: Parser) -> None:
    """Add the options for the share of the work that this process does."""
    text = "number of this process, from 0 (default: RANK of torchrun, else SLURM_PROCID, else 0)"
    parser.add_argument("--process-index", type=int, metavar="I", help=text)
    text = "number of processes that share the work (default: WORLD_SIZE, else SLURM_NTASKS, else 1)"
    parser.add_argument("--num-processes", type=int, metavar="N", help=text)


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise ValueError if an option is set, but is not a positive, finite number."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            option = "--" + name.strip("_").replace("_", "-")
            raise ValueError(f"{option} must be {'finite' if value == math.inf else 'positive'}, got {value}")
