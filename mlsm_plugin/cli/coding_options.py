"""Options that several coding commands share."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsm_plugin.hidden_states.block_reader import BlockSettings

AUXILIARY_HELP = (
    "auxiliary model: a fairseq checkpoint, or hf:PATH, the folder or hub name of a BERT- or RoBERTa-like Hugging Face "
    "model (its text must be binarized with `mlsm binarize --tokenizer hf:PATH`)"
)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how the model runs."""
    parser.add_argument("--device", help="torch device of the model (default: the GPU if there is one)")
    parser.add_argument(
        "--fp16", action="store_true", help="run the model in half precision: float16, on a CPU bfloat16"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="number of CPU threads (default: all cores)")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens in one forward pass; limits the memory",
    )


def add_block_options(
    parser: argparse.ArgumentParser,
    *,
    default: str = "what the model can take, at most 512",
    break_mode: str = "complete",
) -> None:
    """Add the options that cut the text into blocks; ``default`` and ``break_mode`` describe their defaults."""
    parser.add_argument(
        "--tokens-per-sample",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"longest block in tokens, BOS included (default: {default})",
    )
    parser.add_argument(
        "--sample-break-mode",
        default=argparse.SUPPRESS,
        choices=["none", "complete", "complete_doc", "eos"],
        help=f"where blocks may end, as in fairseq-train (default: {break_mode})",
    )


def block_settings(args: argparse.Namespace, model: str, learned: dict[str, Any] | None = None) -> BlockSettings:
    """The block settings that the command line asks for.

    Args:
        args: holds those options of :func:`add_block_options` that were given.
        model: name of the model; it decides the length if nothing else does.
        learned: the block settings that a dictionary was learned with; they take precedence over the model.
    """
    from mlsm_plugin.hidden_states.block_reader import BlockSettings
    from mlsm_plugin.hidden_states.sources import default_tokens_per_sample

    names = ("tokens_per_sample", "sample_break_mode")
    chosen = {**(learned or {}), **{name: getattr(args, name) for name in names if hasattr(args, name)}}
    if "tokens_per_sample" not in chosen:
        chosen["tokens_per_sample"] = default_tokens_per_sample(model)
    return BlockSettings(**chosen)


def block_flags(blocks: BlockSettings) -> list[str]:
    """The flags of a command for its blocks."""
    return ["--tokens-per-sample", str(blocks.tokens_per_sample), "--sample-break-mode", blocks.sample_break_mode]


def user_dir_flags(args: argparse.Namespace) -> list[str]:
    """The flag that hands the folder of the user's own plugin to another command."""
    return ["--user-dir", args.user_dir] if args.user_dir else []


def add_share_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which part of the work this process does."""
    parser.add_argument(
        "--shard-index",
        type=int,
        metavar="I",
        help="number of this process, from 0 (default: RANK of torchrun, else SLURM_PROCID, else 0)",
    )
    parser.add_argument(
        "--num-shards",
        type=int,
        metavar="N",
        help="number of processes that share the work (default: WORLD_SIZE, else SLURM_NTASKS, else 1)",
    )


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise ValueError if an option is given and not a positive, finite number."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            option = "--" + name.strip("_").replace("_", "-")
            raise ValueError(f"{option} must be {'finite' if value == math.inf else 'positive'}, got {value}")


def check_coverage(coverage: float) -> None:
    """Raise ValueError if the value of --coverage is not a share of the positions."""
    if not 0 < coverage <= 1:
        raise ValueError(f"--coverage must be above 0 and at most 1, got {coverage:g}")
