"""MLSM in stages on the model's own codes: how each stage is trained, and on which codes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import ONLINE, STORE, StageSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.settings import identity
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.core.machine.devices import default_device, has_fast_bf16
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import Coded, learn_from_split, splits_encoder
from mlsm_plugin.fairseq_plugin.compat.binarized_files import combined_splits
from mlsm_plugin.fairseq_plugin.data.token_blocks import folders_of
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import (
    begin_run,
    block_flags,
    early_end,
    separate_words,
    train_until,
)
from mlsm_plugin.fairseq_plugin.pipelines.staged_pretraining import Stage, keep_stages, run_stages, stages_of

# the settings that decide the first stage, which has no codes
OF_FIRST_STAGE = ("max_update", "blocks", "stages", "mlm_weight", "atoms", "seed")
CHOSEN_HERE = ("--task", "--criterion", "--num-atoms", "--best-checkpoint-metric")


@dataclass(frozen=True)
class _Run:
    """The settings of a run: its training and its codes."""

    data_bin: str
    settings: StageSettings
    learning: LearningSettings
    layer: int | None
    blocks: BlockSettings
    flags: Sequence[str]
    coded: Coded

    def folders(self, stage: Stage) -> list[tuple[str, Path]]:
        """Each dataset with the folder of its codes."""
        first, *further = folders_of(self.data_bin)
        further_folders = [(data, stage.folder / f"data-{number}") for number, data in enumerate(further, start=2)]
        return [(first, stage.folder), *further_folders]

    def flags_of(self, stage: Stage) -> list[str]:
        """The flags of ``fairseq-train`` that are specific to a stage."""
        settings = self.settings
        learning = self.learning
        flags = ["--criterion", "latent_semantic_kl", "--mlm-weight", str(settings.mlm_weight)]
        flags += ["--num-atoms", str(learning.atoms)]
        flags += ["--best-checkpoint-metric", "mlm_loss"]  # the loss changes between stages
        if stage.number == 0:
            return ["--task", "plain_masked_lm", "--latent-weight", "0", *flags]
        flags += ["--task", "masked_latent_semantic", "--latent-weight", str(settings.latent_weight)]
        flags += ["--latent-top", str(settings.latent_top)] if settings.latent_top else []
        if settings.latent_source == STORE:
            return [*flags, "--latent-codes", os.pathsep.join(str(codes) for _, codes in self.folders(stage))]
        flags += ["--latent-source", ONLINE, "--auxiliary-checkpoint", str(stage.teacher)]
        flags += ["--auxiliary-fp16"] if learning.fp16 else []
        return [*flags, "--latent-dictionary", str(stage.dictionary)]

    def make_codes(self, stage: Stage) -> None:
        """Learn the dictionary of a stage and code with it; skips finished work."""
        teacher = str(stage.teacher)
        folders = self.folders(stage)
        layer = source_of(teacher).layers_of(teacher) if self.layer is None else self.layer
        learning = replace(self.learning, layer=layer)
        learn_from_split(folders[0][0], teacher, stage.dictionary, learning, self.blocks)
        if self.settings.latent_source == ONLINE:
            return
        coding = CodingSettings.with_run(learning, layer, blocks=self.blocks)
        coder = load_coder(stage.dictionary)
        train, *validated = coded_splits(folders[0][0], self.flags)
        for number, (data, codes) in enumerate(folders):
            encode = splits_encoder(data, auxiliary=teacher, coder=coder, settings=coding, output=codes)
            for split in [train] if number else [train, *validated]:
                self.coded(split, partial(encode, split))


def pretrain_in_stages(
    data_bin: PathLike,
    save_dir: PathLike,
    settings: StageSettings,
    learning: LearningSettings,
    blocks: BlockSettings,
    *,
    layer: int | None = None,
    arch: str | None = None,
    max_update: int = 100_000,
    flags: Sequence[str] = (),
    coded: Coded = lambda split, encode: encode(),
) -> str | None:
    """Run the missing stages; returns a line about a training that ended early, else None.

    ValueError if a part failed, ``save_dir`` holds another run, or each stage sets one of the flags itself.

    Args:
        data_bin, save_dir, arch, max_update, flags: :func:`~mlsm_plugin.fairseq_plugin.pipelines.pretraining.pretrain`.
        learning: the coder of each stage, and how the frozen copy runs: by default on the device and in the precision
            of the training. Its layer is ignored.
        blocks: samples of the training and of the coding.
        layer: layer whose hidden states are coded; None: the last layer.
        coded: takes the name of a split and the function that codes it, calls it, and shows the figures.
    """
    save_dir = Path(save_dir)
    flags = separate_words(flags)
    for flag in CHOSEN_HERE:
        if flag in flags:
            raise ValueError(f"{flag} is chosen for each stage by `mlsm pretrain`; leave it out, or use fairseq-train")
    decides: dict[str, object] = {"max_update": max_update, "blocks": identity(blocks), **identity(settings)}
    decides |= identity(learning) | {"layer": layer}
    device = learning.device or ("cpu" if "--cpu" in flags else None)
    learning = replace(learning, device=device, fp16=learning.fp16 or in_half_precision(device, flags))
    run = _Run(os.fspath(data_bin), settings, learning, layer, blocks, flags, coded)
    stages = stages_of(save_dir, max_update, settings.stages)
    record = begin_run(data_bin, save_dir, flags, arch=arch)
    keep_stages(record, stages, decides, OF_FIRST_STAGE)
    flags = [*flags, "--seed", str(learning.seed), *block_flags(blocks)]

    def train(stage: Stage) -> None:
        train_until(
            stage.end, data_bin, save_dir, arch=arch, max_update=max_update, flags=flags, part=run.flags_of(stage)
        )
        if stage is not stages[-1] and (early := early_end(save_dir, stage.end, flags)):
            raise ValueError(f"{early}; the next stage begins with the model after update {stage.end}")

    run_stages(stages, record, seed=learning.seed, make_codes=run.make_codes, train=train)
    return early_end(save_dir, max_update, flags)


def in_half_precision(device: str | None, flags: Sequence[str]) -> bool:
    """Whether a training with these flags computes in half precision."""
    autocast = flags[flags.index("--autocast") + 1] if "--autocast" in flags[:-1] else "auto"
    return autocast == "bf16" or (autocast == "auto" and has_fast_bf16(default_device(device)))


def coded_splits(data: str, flags: Sequence[str]) -> list[str]:
    """The training split, then the validation splits of the first dataset."""
    values = dict(pairwise(flags))
    splits = [values.get("--train-subset", "train"), *values.get("--valid-subset", "valid").split(",")]
    if {"--combine-valid-subsets", "--combine-val"} & set(flags):
        splits += [Path(split).name for split in combined_splits(os.path.join(data, "valid"))]
    return list(dict.fromkeys(splits))
