"""``mlsm pretrain``: MLSM in stages from nothing, with the codes of the model itself."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.cli.coding_options import (
    add_block_options,
    add_model_options,
    block_flags,
    block_settings,
    check_positive,
    user_dir_flags,
)
from mlsm_plugin.cli.dictionary import CODERS, LASSO, add_sae_options, choose_defaults, sae_settings
from mlsm_plugin.cli.next_commands import chained
from mlsm_plugin.cli.output_folder import output_folder

if TYPE_CHECKING:
    from mlsm_plugin.auxiliary.staged_pretraining import Stage
    from mlsm_plugin.hidden_states.block_reader import BlockSettings

TAKES_EXTRA_FLAGS = True
DEFAULT_STAGES = (20,)
DEFAULT_BLOCKS = {"tokens_per_sample": 512}
CHOSEN_HERE = ("--task", "--criterion", "--num-atoms", "--best-checkpoint-metric")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command; every other flag goes to fairseq-train."""
    parser.epilog = (
        "The model first learns masked LM. Then a dictionary is learned from its own hidden states, and it predicts "
        "the codes of a frozen copy of itself, together with the masked tokens: MLSM without a second model. Every "
        "other flag is handed to fairseq-train, as in `mlsm auxiliary`. Run the same command again to resume a "
        "stopped run."
    )
    parser.add_argument(
        "data_bin",
        metavar="DATA_BIN",
        help="binarized dataset that `mlsm binarize` wrote, or several with one vocabulary joined by colons, which "
        "epochs use in turn; the first one also has the validation split, and the dictionaries are learned from it",
    )
    parser.add_argument(
        "--save-dir", type=output_folder, required=True, metavar="DIR", help="folder for the checkpoints and the stages"
    )
    parser.add_argument(
        "--arch",
        help="architecture with a latent head: mlsm_modern_tiny, _small, _medium, _base, mlsm_roberta_small, ... "
        "(default: mlsm_modern_small, or that of the run in DIR)",
    )
    parser.add_argument("--max-update", type=int, default=100_000, metavar="N", help="number of updates of all stages")
    parser.add_argument(
        "--stages",
        nargs="+",
        type=int,
        default=list(DEFAULT_STAGES),
        metavar="PERCENT",
        help="when a stage with new codes begins, in percent of the updates, e.g. 20 60 (default: 20)",
    )
    parser.add_argument("--latent-weight", type=float, default=1.0, metavar="W", help="weight of the KL from the codes")
    parser.add_argument("--mlm-weight", type=float, default=1.0, metavar="W", help="weight of the masked-LM loss")
    parser.add_argument(
        "--latent-source",
        default="store",
        choices=["store", "online"],
        help="store: code the dataset at the beginning of a stage; online: code the masked tokens in every update",
    )
    parser.add_argument("--latent-top", type=int, metavar="N", help="keep the N strongest atoms of each code")
    dictionary = parser.add_argument_group("dictionary and codes")
    dictionary.add_argument("--layer", type=int, metavar="L", help="hidden state to code (default: the last)")
    dictionary.add_argument("--coder", default="topk", choices=CODERS, help="kind of coder, as in `mlsm dictionary`")
    dictionary.add_argument("--atoms", type=int, default=3000, metavar="N", help="number of latent properties")
    dictionary.add_argument(
        "--lambda", dest="lambda_", type=float, help="lasso: weight of the L1 penalty (default: 0.05)"
    )
    dictionary.add_argument("--iterations", type=int, metavar="N", help="lasso: number of mini-batches (default: 1000)")
    dictionary.add_argument("--tokens", type=int, default=1_000_000, metavar="N", help="hidden states to learn from")
    add_sae_options(dictionary)
    dictionary.add_argument("--seed", type=int, default=1, metavar="N", help="random seed of training and dictionary")
    add_block_options(parser, default="512")
    add_model_options(parser)


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Run the stages that are missing."""
    from mlsm_plugin.auxiliary.pretraining import begin_run, early_end, separate_words, train_until
    from mlsm_plugin.auxiliary.staged_pretraining import plan_of, run_stages, stages_of

    extra = separate_words(extra)
    blocks = _check(args, extra)
    save_dir = Path(args.save_dir)
    stages = stages_of(save_dir, args.max_update, args.stages)
    begin_run(args.data_bin, save_dir)
    of_codes = _settings_of_codes(args)
    plan_of(stages, save_dir, {**_settings_of_training(args, blocks), **of_codes}, list(of_codes)).begin()
    flags = [*extra, "--seed", str(args.seed), *block_flags(blocks), *user_dir_flags(args)]

    def make_codes(stage: Stage) -> None:
        for words in _coding_commands(args, stage, blocks, extra):
            _run_command(words)

    def train(stage: Stage) -> None:
        train_until(
            *(stage.end, args.data_bin, save_dir), arch=args.arch, max_update=args.max_update, flags=flags,
            part=_training_flags(args, stage, extra),
        )  # fmt: skip
        if stage is not stages[-1] and (early := early_end(save_dir, stage.end, flags)):
            raise ValueError(f"{early}; the next stage begins with the model after update {stage.end}")

    run_stages(stages, save_dir, seed=args.seed, make_codes=make_codes, train=train)
    complete = f"all {len(stages)} stages are complete: {save_dir / 'checkpoint_last.pt'}"
    print(early_end(save_dir, args.max_update, flags) or complete)
    return 0


def _check(args: argparse.Namespace, extra: Sequence[str]) -> BlockSettings:
    """Check now what would fail hours later; returns the blocks.

    Raises:
        ValueError: an option is out of range, or is one that this command chooses.
    """
    check_positive(args, "max_update", "atoms", "lambda_", "iterations", "tokens", "batch_tokens", "threads", "k")
    check_positive(args, "latent_weight", "mlm_weight", "latent_top")
    for flag in CHOSEN_HERE:
        if flag in extra:
            raise ValueError(f"{flag} is chosen for each stage by `mlsm pretrain`; leave it out, or use fairseq-train")
    if args.layer is not None and args.layer < 0:
        raise ValueError(f"--layer must be at least 0, got {args.layer}")
    choose_defaults(args)
    if args.coder != LASSO:
        sae_settings(args)  # raises if a value is out of range
    return block_settings(args, "", {**DEFAULT_BLOCKS})


def _settings_of_training(args: argparse.Namespace, blocks: BlockSettings) -> dict[str, object]:
    """What decides the result of the first stage."""
    names = ("max_update", "stages", "mlm_weight", "atoms", "seed")
    return {**{name: getattr(args, name) for name in names}, "blocks": vars(blocks)}


def _settings_of_codes(args: argparse.Namespace) -> dict[str, object]:
    """What else decides the result of the later stages."""
    names = ["latent_weight", "latent_source", "latent_top", "layer", "coder", "tokens"]
    names += ["lambda_", "iterations"] if args.coder == LASSO else ["k", "matryoshka"]
    return {name.strip("_"): getattr(args, name) for name in names}


def _training_flags(args: argparse.Namespace, stage: Stage, extra: Sequence[str]) -> list[str]:
    """The flags of ``fairseq-train`` that a stage has of its own."""
    flags = ["--criterion", "latent_semantic_kl", "--mlm-weight", str(args.mlm_weight), "--num-atoms", str(args.atoms)]
    flags += ["--best-checkpoint-metric", "mlm_loss"]  # the loss is another one in each stage
    if stage.number == 0:
        return ["--task", "plain_masked_lm", "--latent-weight", "0", *flags]
    flags += ["--task", "masked_latent_semantic", "--latent-weight", str(args.latent_weight)]
    flags += ["--latent-top", str(args.latent_top)] if args.latent_top else []
    if args.latent_source == "store":
        folders = (str(codes) for _, codes in _folders(args.data_bin, stage))
        return [*flags, "--latent-codes", os.pathsep.join(folders)]
    flags += ["--latent-source", "online", "--auxiliary-checkpoint", str(stage.teacher)]
    flags += ["--auxiliary-fp16"] if _codes_in_half_precision(args, extra) else []
    return [*flags, "--latent-dictionary", str(stage.dictionary)]


def _device(args: argparse.Namespace, extra: Sequence[str]) -> str | None:
    """The device for the dictionary and the codes; None: the best there is."""
    return args.device or ("cpu" if "--cpu" in extra else None)


def _codes_in_half_precision(args: argparse.Namespace, extra: Sequence[str]) -> bool:
    """Whether the frozen copy runs in half precision: if asked for, or if the training does."""
    from mlsm_plugin.hidden_states.devices import default_device, has_fast_bf16

    autocast = extra[extra.index("--autocast") + 1] if "--autocast" in extra[:-1] else "auto"
    fast = autocast == "auto" and has_fast_bf16(default_device(_device(args, extra)))
    return args.fp16 or autocast == "bf16" or fast


def _coding_commands(
    args: argparse.Namespace, stage: Stage, blocks: BlockSettings, extra: Sequence[str]
) -> list[list[str]]:
    """The commands that make the dictionary and the codes of a stage."""
    from mlsm_plugin.hidden_states.sources import source_of

    teacher, dictionary = str(stage.teacher), str(stage.dictionary)
    layer = args.layer if args.layer is not None else source_of(teacher).layers_of(teacher)
    device = _device(args, extra)
    how = ["--auxiliary", teacher, *block_flags(blocks), *user_dir_flags(args)]
    how += ["--batch-tokens", str(args.batch_tokens)]
    how += ["--device", device] if device else []
    how += ["--threads", str(args.threads)] if args.threads else []
    how += ["--fp16"] if _codes_in_half_precision(args, extra) else []
    folders = _folders(args.data_bin, stage)
    learn = ["dictionary", folders[0][0], "--layer", str(layer), "--output", dictionary, *how, "--coder", args.coder]
    learn += ["--atoms", str(args.atoms), "--tokens", str(args.tokens), "--seed", str(args.seed)]
    if args.coder == LASSO:
        learn += ["--lambda", str(args.lambda_), "--iterations", str(args.iterations)]
    else:
        learn += ["--k", str(args.k)]
        learn += ["--matryoshka", *map(str, args.matryoshka)] if args.matryoshka else []
    if args.latent_source == "online":
        return [learn]
    train, *validated = _splits(folders[0][0], extra)
    commands = [learn]
    for number, (data, codes) in enumerate(folders):
        splits = [train] if number else [train, *validated]
        commands.append(["encode", data, "--dictionary", dictionary, *how, "--output", str(codes), "--splits", *splits])
    return commands


def _folders(data_bin: str, stage: Stage) -> list[tuple[str, Path]]:
    """The datasets, each with the folder of its codes."""
    from mlsm_plugin.data.token_blocks import folders_of

    return [
        (data, stage.folder / f"data-{number}" if number > 1 else stage.folder)
        for number, data in enumerate(folders_of(data_bin), start=1)
    ]


def _splits(data: str, extra: Sequence[str]) -> list[str]:
    """The split that is trained on, and those of the first dataset that are validated on."""
    from mlsm_plugin.fairseq_seams.binarized_files import combined_splits

    values = dict(pairwise(extra))
    chosen = [values.get("--train-subset", "train"), *values.get("--valid-subset", "valid").split(",")]
    if {"--combine-valid-subsets", "--combine-val"} & set(extra):
        chosen += [Path(split).name for split in combined_splits(os.path.join(data, "valid"))]
    return list(dict.fromkeys(chosen))


def _run_command(words: Sequence[str]) -> None:
    from mlsm_plugin.cli.main import main

    print(f"\n$ mlsm {shlex.join(words)}", flush=True)
    with chained():
        status = main(list(words))
    if status != 0:
        raise ValueError(f"mlsm {words[0]} failed; its own message is above")
