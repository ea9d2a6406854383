"""Pre-training of the auxiliary masked LM with fairseq's trainer."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from mlsm_plugin.core.files.atomic_files import PathLike, link_file
from mlsm_plugin.core.files.model_files import copy_tokenizer
from mlsm_plugin.core.files.output_lock import only_writer, run_child
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.files.progress import shown_by_another_process
from mlsm_plugin.core.files.step_record import RECORD, StepRecord
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.optimizers.muon import BLOCK_ROWS, UPDATES_IN_BLOCKS
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import parts_of, read_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import architecture_of, optimizer_of, updates_of
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST, repair_last
from mlsm_plugin.fairseq_plugin.compat.version_shims import PACKAGE_DIR
from mlsm_plugin.fairseq_plugin.data.token_blocks import folders_of, split_fingerprint

logger = logging.getLogger(__name__)

# a partially trained auxiliary model is useful, too (Berend, BabyLM 2023)
KEPT_PERCENTAGES = (10, 25, 50, 100)
DEFAULT_ARCHITECTURE = "mlsm_modern_small"
MASKS = {"mask_prob": 0.3, "mask_prob_end": 0.15}  # defaults of mlsm_modern
DECIDE_MASKS = {"--task", "--mask-prob", "--mask-prob-end", "--mask-multiple-length", "--skip-masking"}
# the sizes that a continued model must keep, in the order in which they depend on each other
SIZES = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
    "max_positions",
    "attention_window",
    "global_attention_every",
)
# flags that can end a run before its last update
EARLY_ENDS = ("--max-epoch", "--patience", "--stop-time-hours", "--stop-min-lr")


def separate_words(flags: Sequence[str]) -> list[str]:
    """Split ``--flag=value`` into two words, so that each flag is an item of the list.

    A value that begins with a dash stays in its word, since it would be parsed as a flag otherwise.
    """
    words = []
    for word in flags:
        name, equals, value = word.partition("=")
        words += [name, value] if equals and name.startswith("--") and not value.startswith("-") else [word]
    return words


def block_flags(blocks: BlockSettings) -> list[str]:
    """The flags of ``fairseq-train`` that set its blocks."""
    return ["--tokens-per-sample", str(blocks.tokens_per_sample), "--sample-break-mode", blocks.sample_break_mode]


def default_flags(
    max_update: int, arch: str, user_flags: list[str], *, optimizer: str | None = None, run: Path | None = None
) -> list[str]:
    """``fairseq-train`` flags that train an auxiliary model; ``user_flags`` follow them and override them.

    The learning rate rises and falls over ``max_update`` updates. ``mlsm_modern`` and ``mlsm_deberta`` have no dropout,
    a higher learning rate, and more masks at the beginning (docs/research/recipe.md); the checkpoint ``run`` keeps its
    masks. Options of the default optimizer or schedule are left out if ``user_flags`` choose another, since fairseq
    rejects them.
    """
    optimizer = optimizer or _optimizer(None, user_flags, arch)
    modern = _is_modern(arch)
    flags = ["--task", "plain_masked_lm", "--criterion", "masked_lm", "--arch", arch, "--autocast", "auto"]
    flags += ["--sample-break-mode", "complete", "--tokens-per-sample", "512"]
    flags += ["--skip-invalid-size-inputs-valid-test", "--required-batch-size-multiple", "1"]
    flags += ["--clip-norm", "1.0"]
    if not modern:
        flags += ["--dropout", "0.1", "--attention-dropout", "0.1"]
    flags += ["--lr", "1e-3" if modern else "5e-4"]
    flags += ["--batch-size", "32", "--seed", "1"]
    flags += ["--no-epoch-checkpoints", "--save-interval-updates", "5000", "--keep-interval-updates", "1"]
    flags += ["--log-format", "simple", "--log-interval", "100"]
    if "--optimizer" not in user_flags:
        flags += ["--optimizer", optimizer, "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-6"]
        flags += ["--weight-decay", "0.01"]
    trained_with = dict(pairwise(user_flags)).get("--optimizer", optimizer)
    if trained_with == "muon" and max_update <= UPDATES_IN_BLOCKS:
        flags += ["--muon-block-rows", str(BLOCK_ROWS)]
    if "--lr-scheduler" not in user_flags:
        flags += ["--lr-scheduler", "polynomial_decay", "--total-num-update", str(max_update)]
        flags += ["--warmup-updates", str(max(1, max_update * 6 // 100))]
    if modern:
        weights = "bert" if trained_with == "muon" and arch.startswith("mlsm_modern") else "width"
        flags += _beginning(run, weights, masks=not DECIDE_MASKS & set(user_flags))
    if "--mask-prob-end" in {*flags, *user_flags}:  # a part of the run has another --max-update
        flags += ["--mask-updates", str(max_update)]
    return flags


def _is_modern(arch: str) -> bool:
    return arch.startswith(("mlsm_modern", "mlsm_deberta"))


def _beginning(run: Path | None, weights: str, *, masks: bool) -> list[str]:
    """The flags of a run's initial ``weights``, and of its masks if ``masks``; an existing checkpoint decides both."""
    options: dict[str, object] = {**MASKS, "initialization": weights}
    if run is not None and run.exists():
        parts = parts_of(read_contents(run))
        options = {name: {**parts["model"], **parts["task"]}.get(name) for name in options}
    return as_flags(
        {name: value for name, value in options.items() if value is not None and (masks or name not in MASKS)}
    )


def as_flags(options: Mapping[str, object]) -> list[str]:
    """Options by name as words of a command."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def pretrain(
    data_bin: PathLike,
    save_dir: PathLike,
    *,
    arch: str | None,
    max_update: int,
    flags: list[str],
    keep_at: Sequence[int] = KEPT_PERCENTAGES,
) -> list[Path]:
    """Train, and keep ``checkpoint_at_P_percent.pt`` for some percentages P of the updates; returns these files.

    The trainer stops at each percentage and resumes there, as after a kill. The last checkpoint of a run that ended
    early is returned, too. ValueError if the trainer failed, or ``save_dir`` holds a run on other data
    or a longer one.

    Args:
        data_bin: a binarized dataset, or several joined by colons, which epochs use in turn; the first validates.
        save_dir: folder for the checkpoints; an existing run is resumed.
        arch: a fairseq architecture; None: the architecture of an existing run, else ``mlsm_modern_small``.
        max_update: total number of updates.
        flags: further ``fairseq-train`` flags, see :func:`separate_words`; they override the defaults.
        keep_at: the percentages, from 1 to 100; the checkpoint at 100 % is always kept.
    """
    save_dir = Path(save_dir)
    last = save_dir / LAST
    begin_run(data_bin, save_dir, flags, arch=arch)
    reached = updates_of(last)
    if reached > max_update:
        raise ValueError(
            f"{save_dir} holds a run of {reached} updates, more than the {max_update} that were asked for; ask for at "
            f"least {reached}, or choose another folder"
        )
    goals = {
        save_dir / f"checkpoint_at_{percentage}_percent.pt": max(1, max_update * percentage // 100)
        for percentage in sorted({*keep_at, 100})
    }
    early = None
    for snapshot, goal in goals.items():
        if goal < max_update and _is_model_after(goal, snapshot):
            continue
        train_until(goal, data_bin, save_dir, arch=arch, max_update=max_update, flags=flags)
        if early := early_end(save_dir, goal, flags):
            logger.warning("%s", early)
            break
        if updates_of(last) == goal:
            link_file(last, snapshot)
    snapshots = [snapshot for snapshot, goal in goals.items() if _is_model_after(goal, snapshot)]
    for snapshot, goal in goals.items():
        if snapshot not in snapshots and snapshot.exists():
            logger.warning("%s is not the model after update %d of %d; delete or rename it", snapshot, goal, max_update)
    return [*snapshots, last] if early and last.exists() else snapshots


def early_end(save_dir: Path, goal: int, flags: Sequence[str]) -> str | None:
    """A line about a run that ended before update ``goal``, with the flags that may be the cause; else None."""
    reached = updates_of(save_dir / LAST)
    if reached >= goal:
        return None
    ending_flags = [f"{flag} {value}" for flag, value in pairwise(flags) if flag in EARLY_ENDS]
    reason = " or ".join(ending_flags) or "the trainer's own message is above"
    return f"training ended after update {reached}, before update {goal} ({reason}): {save_dir}"


def _is_model_after(updates: int, checkpoint: Path) -> bool:
    """Whether a checkpoint exists, is whole, and has this number of updates."""
    try:
        return updates_of(checkpoint) == updates
    except ValueError:
        return False


def process_of(flags: Sequence[str]) -> ProcessRank:
    """Rank and world size of this process in a training with these flags, with or without torchrun.

    Without torchrun, fairseq starts a process for each GPU.
    """
    values = dict(pairwise(flags))
    gpus = 1 if "--cpu" in flags else max(1, torch.cuda.device_count())
    ranks = int(values.get("--distributed-world-size") or os.environ.get("WORLD_SIZE") or gpus)
    rank = int(values.get("--distributed-rank") or os.environ.get("RANK") or 0)
    return ProcessRank(rank, ranks)


def begin_run(data_bin: PathLike, save_dir: Path, flags: Sequence[str], *, arch: str | None = None) -> StepRecord:
    """Make the folder of a run with the record of its data and the tokenizer, and repair its last checkpoint.

    Returns the record, which only the first process of a training with these flags writes.

    OSError if a dataset lacks its dictionary or its training split; ValueError if the folder holds a run on other data
    or of another architecture or size, or is damaged, or the datasets have different vocabularies.
    """
    folders = folders_of(data_bin)
    fingerprints = [split_fingerprint(Path(folder, "train")) for folder in folders]
    advice = "Choose another --save-dir; to continue from a checkpoint on other data, pass it with --restore-file"
    content: dict[str, object] = {"train": fingerprints if len(fingerprints) > 1 else fingerprints[0]}
    valid = Path(folders[0], "valid")  # it decides which model is the best
    if valid.with_suffix(".idx").is_file():
        content["valid"] = split_fingerprint(valid)
    record = StepRecord(save_dir / RECORD, process_of(flags))
    last = save_dir / LAST
    repair_last(last)
    if last.exists():
        _check_same_model(last, arch, flags)
    with only_writer(save_dir):  # the trainer takes the lock later
        record.keep_settings("data", content, advice)
        copy_tokenizer(folders[0], save_dir)
    return record


def _check_same_model(last: Path, arch: str | None, flags: Sequence[str]) -> None:
    """Raise ValueError if the run of a checkpoint has another architecture or other sizes than the command line."""
    if arch and architecture_of(last) != arch:
        raise ValueError(
            f"{last.parent} holds a run with --arch {architecture_of(last)}, and not {arch}; leave --arch out to "
            "resume it, or choose another --save-dir"
        )
    model = parts_of(read_contents(last))["model"]
    values = dict(pairwise(flags))
    for name in SIZES:
        flag = f"--{name.replace('_', '-')}"
        recorded = model.get(name)
        if recorded is not None and values.get(flag, str(recorded)) != str(recorded):
            raise ValueError(
                f"{last.parent} holds a run with {flag} {recorded}, and not {values[flag]}; pass that to resume it, or "
                "choose another --save-dir"
            )


def train_until(
    goal: int,
    data_bin: PathLike,
    save_dir: Path,
    *,
    arch: str | None,
    max_update: int,
    flags: list[str],
    part: Sequence[str] = (),
) -> None:
    """Train until update ``goal``, unless the run has reached it; an existing run is resumed.

    ``part`` holds the flags of this part of the run, which override ``flags``; see :func:`pretrain` for the rest.
    ValueError if the trainer failed.
    """
    last = save_dir / LAST
    if updates_of(last) >= goal:
        return
    source = last if last.exists() else _restored(flags)
    if not arch:
        arch = architecture_of(source) if source else DEFAULT_ARCHITECTURE
    optimizer = _optimizer(source, flags, arch)
    command = [sys.executable, "-m", "fairseq_cli.train", str(data_bin), "--user-dir", PACKAGE_DIR]
    command += ["--save-dir", str(save_dir)]
    command += default_flags(max_update, arch, flags, optimizer=optimizer, run=last)
    command += _without_restart(flags, last)
    command += [*part, "--max-update", str(goal)]
    with shown_by_another_process():
        status = run_child(command)
    if status != 0:
        raise ValueError(f"fairseq-train stopped with exit status {status}; its own message is above")


def _restored(flags: list[str]) -> Path | None:
    """The checkpoint that ``--restore-file`` names, if it exists."""
    if "--restore-file" not in flags[:-1]:
        return None
    checkpoint = Path(flags[flags.index("--restore-file") + 1])
    return checkpoint if checkpoint.is_file() else None


def _optimizer(source: Path | None, flags: list[str], arch: str) -> str:
    """The optimizer that the flags allow and that can continue the checkpoint ``source``; else the best optimizer."""
    if {"--memory-efficient-fp16", "--memory-efficient-bf16"} & set(flags):
        return "adam"
    if source is not None and "--reset-optimizer" not in flags:
        begun = {"FairseqAdam": "adam", "FusedAdamW": "fused_adamw"}.get(optimizer_of(source))
        if begun:
            return begun
    flat = {"--fp16", "--bf16"} & set(flags) and "--fp16-no-flatten-grads" not in flags  # all weights are one vector
    return "muon" if _is_modern(arch) and not flat else "fused_adamw"


def _without_restart(flags: list[str], last: Path) -> list[str]:
    """The flags, without ``--restore-file`` if the run already has a checkpoint, which it would overrule."""
    if not last.exists() or "--restore-file" not in flags:
        return flags
    where = flags.index("--restore-file")
    resets = {"--reset-optimizer", "--reset-lr-scheduler", "--reset-meters", "--reset-dataloader"}
    return [flag for flag in flags[:where] + flags[where + 2 :] if flag not in resets]
