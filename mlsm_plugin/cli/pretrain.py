"""``mlsm pretrain``: MLSM in stages from nothing, with the codes of the model itself."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm_plugin.auxiliary.coder_learning import LASSO, LearningSettings
from mlsm_plugin.auxiliary.split_coder import CodingSettings
from mlsm_plugin.cli.coding_options import (
    OF_LEARNING,
    add_block_options,
    add_run,
    block_flags,
    block_settings,
    check_positive,
    user_dir_flags,
)
from mlsm_plugin.cli.encode import encode_and_report
from mlsm_plugin.cli.settings_flags import Depends, add_settings, settings_of
from mlsm_plugin.files.work_share import ALL_OF_IT
from mlsm_plugin.hidden_states.settings import BlockSettings, ModelRun

if TYPE_CHECKING:
    from mlsm_plugin.auxiliary.staged_pretraining import Stage

TAKES_EXTRA_FLAGS = True
DEFAULT_STAGES = (20,)
CHOSEN_HERE = ("--task", "--criterion", "--num-atoms", "--best-checkpoint-metric")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command; every other flag goes to fairseq-train."""
    parser.epilog = (
        "The model first learns masked LM. Then a dictionary is learned from its own hidden states, and it predicts "
        "the codes of a frozen copy of itself, together with the masked tokens: MLSM without a second model. Every "
        "other flag is handed to fairseq-train, as in `mlsm auxiliary`. Run the same command again to resume a "
        "stopped run."
    )
    add_run(parser)
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
    dictionary = parser.add_argument_group("dictionary and codes")
    defaults = {"coder": "topk", "layer": Depends("the last")}
    add_settings(dictionary, LearningSettings, only=("layer", *OF_LEARNING), defaults=defaults)
    add_settings(dictionary, CodingSettings, only=("latent_top",))
    add_settings(parser, ModelRun)
    add_block_options(parser, default=str(BlockSettings().tokens_per_sample))


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Run the stages that are missing."""
    from mlsm_plugin.auxiliary.pretraining import begin_run, early_end, separate_words, train_until
    from mlsm_plugin.auxiliary.staged_pretraining import plan_of, run_stages, stages_of

    extra = separate_words(extra)
    run = _checked(args, extra)
    save_dir = Path(args.save_dir)
    stages = stages_of(save_dir, args.max_update, args.stages)
    begin_run(args.data_bin, save_dir)
    of_codes = _settings_of_codes(args, run)
    plan_of(stages, save_dir, {**_settings_of_training(args, run.blocks), **of_codes}, list(of_codes)).begin()
    flags = [*extra, "--seed", str(args.seed), *block_flags(run.blocks), *user_dir_flags(args)]

    def train(stage: Stage) -> None:
        train_until(
            *(stage.end, args.data_bin, save_dir), arch=args.arch, max_update=args.max_update, flags=flags,
            part=_training_flags(args, stage, run),
        )  # fmt: skip
        if stage is not stages[-1] and (early := early_end(save_dir, stage.end, flags)):
            raise ValueError(f"{early}; the next stage begins with the model after update {stage.end}")

    make_codes = partial(_make_codes, args, run, extra)
    run_stages(stages, save_dir, seed=args.seed, make_codes=make_codes, train=train)
    complete = f"all {len(stages)} stages are complete: {save_dir / 'checkpoint_last.pt'}"
    print(early_end(save_dir, args.max_update, flags) or complete)
    return 0


@dataclass(frozen=True)
class Checked:
    """The settings of the codes; a layer of None is the last one."""

    learning: LearningSettings
    layer: int | None
    blocks: BlockSettings


def _checked(args: argparse.Namespace, extra: Sequence[str]) -> Checked:
    """Check now what would fail hours later.

    Raises:
        ValueError: an option is out of range, or is one that this command chooses.
    """
    check_positive(args, "max_update", "latent_weight", "mlm_weight")
    for flag in CHOSEN_HERE:
        if flag in extra:
            raise ValueError(f"{flag} is chosen for each stage by `mlsm pretrain`; leave it out, or use fairseq-train")
    layer = getattr(args, "layer", None)
    how = {"device": _device(args, extra), "fp16": _codes_in_half_precision(args, extra)}
    learning = settings_of(LearningSettings, args, layer=layer or 0, **how)
    settings_of(CodingSettings, args, layer=0)  # raises if the number of atoms that are kept is out of range
    known = {"tokens_per_sample": BlockSettings().tokens_per_sample}
    return Checked(learning, layer, block_settings(args, "", known))


def _settings_of_training(args: argparse.Namespace, blocks: BlockSettings) -> dict[str, object]:
    """What decides the result of the first stage."""
    names = ("max_update", "stages", "mlm_weight", "atoms", "seed")
    return {**{name: getattr(args, name) for name in names}, "blocks": vars(blocks)}


def _settings_of_codes(args: argparse.Namespace, run: Checked) -> dict[str, object]:
    """What else decides the result of the later stages."""
    names = ["coder", "tokens", *(("lambda_", "iterations") if args.coder == LASSO else ("k", "matryoshka"))]
    chosen = {name: getattr(args, name) for name in ("latent_weight", "latent_source", "latent_top")}
    return {**chosen, "layer": run.layer, **{name.strip("_"): getattr(run.learning, name) for name in names}}


def _training_flags(args: argparse.Namespace, stage: Stage, run: Checked) -> list[str]:
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
    flags += ["--auxiliary-fp16"] if run.learning.fp16 else []
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


def _make_codes(args: argparse.Namespace, run: Checked, extra: Sequence[str], stage: Stage) -> None:
    """Learn the dictionary of a stage and code with it; does nothing where that is done."""
    from mlsm_plugin.auxiliary.corpus_coding import encode_split, learn_from_split
    from mlsm_plugin.hidden_states.sources import source_of
    from mlsm_plugin.sparse_coding.coder import load_coder

    teacher = str(stage.teacher)
    layer = source_of(teacher).layers_of(teacher) if run.layer is None else run.layer
    folders = _folders(args.data_bin, stage)
    learn_from_split(folders[0][0], teacher, stage.dictionary, replace(run.learning, layer=layer), run.blocks)
    if args.latent_source == "online":
        return
    coder = load_coder(stage.dictionary)
    coding = CodingSettings(
        layer, run.blocks,
        **{name: getattr(run.learning, name) for name in ("device", "fp16", "threads", "batch_tokens")},
    )  # fmt: skip
    train, *validated = _splits(folders[0][0], extra)
    for number, (data, codes) in enumerate(folders):
        for split in [train] if number else [train, *validated]:
            encode = partial(encode_split, data, split, auxiliary=teacher, coder=coder, settings=coding, output=codes)
            encode_and_report(split, encode, ALL_OF_IT)


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
