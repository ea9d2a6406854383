"""MLSM without a second model: a stage uses the codes of the model at the beginning of the stage.

The first stage is plain masked LM. Each later stage begins with a frozen copy of the model. A dictionary is learned
from the copy's hidden states, and the model then predicts the copy's codes together with the masked tokens. One
learning-rate schedule, one optimizer and one order of the data span all stages. The model has the latent head from the
first stage on, which keeps the optimizer's state valid. The published code of Berend (2023) can also use the model
itself as auxiliary model.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from mlsm_plugin.core.files.atomic_files import link_file
from mlsm_plugin.core.files.output_lock import in_turn
from mlsm_plugin.core.files.step_record import StepRecord
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import read_contents
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import WORDS, save_whole, updates_of
from mlsm_plugin.fairseq_plugin.compat.model_parts import ATOM_PROJECTION
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST

TEACHER = "model.pt"
INITIAL_DEVIATION = 0.02  # standard deviation, as in BERT's linear layers


@dataclass(frozen=True)
class Stage:
    """A part of a run: the updates from ``begin`` to ``end``; stage 0 is masked LM alone."""

    number: int
    begin: int
    end: int
    folder: Path  # holds the frozen copy of the model, the dictionary learned from it, and the codes

    @property
    def teacher(self) -> Path:
        """The frozen copy of the model."""
        return self.folder / TEACHER

    @property
    def dictionary(self) -> Path:
        """The folder of the dictionary."""
        return self.folder / "dictionary"


def stages_of(save_dir: Path, max_update: int, percentages: Sequence[int]) -> list[Stage]:
    """The stages of a run of ``max_update`` updates; a stage with codes begins at each of ``percentages``.

    ValueError if a percentage is not from 1 to 99, or a stage would have no update.
    """
    if not percentages or not all(1 <= percentage <= 99 for percentage in percentages):
        raise ValueError(f"--stages takes percentages from 1 to 99, got {' '.join(map(str, percentages)) or 'none'}")
    bounds = [0, *(max_update * percentage // 100 for percentage in percentages), max_update]
    if any(end <= begin for begin, end in pairwise(bounds)):
        raise ValueError(
            f"with --stages {' '.join(map(str, percentages))} and --max-update {max_update} a stage has no update; "
            "the percentages must ascend, and more updates help"
        )
    return [
        Stage(number, begin, end, save_dir / f"stage-{number}") for number, (begin, end) in enumerate(pairwise(bounds))
    ]


def keep_stages(
    record: StepRecord, stages: Sequence[Stage], settings: dict[str, object], of_first_stage: Collection[str]
) -> None:
    """Record the settings that decide the stages of a run; ValueError if the run cannot continue with them.

    A run that has not saved a checkpoint yet may change all settings. A run without a dictionary yet must keep only
    those of its first stage, so a layer that does not exist can be corrected without losing this stage.
    """
    fixed: Collection[str] | None = None
    if updates_of(record.path.with_name(LAST)) == 0:
        fixed = ()
    elif not stages[1].dictionary.exists():
        fixed = of_first_stage
    record.keep_settings("stages", settings, "Choose another --save-dir", fixed=fixed)


def begin_stage(stage: Stage, save_dir: Path) -> None:
    """Keep a frozen copy of the model; ValueError if it is missing and the run is beyond this point."""
    last = save_dir / LAST
    if stage.teacher.exists():
        return
    if updates_of(last) != stage.begin:
        raise ValueError(
            f"{stage.teacher}, the model after update {stage.begin}, is missing, and {last} has seen "
            f"{updates_of(last)} updates; restore it, or begin in an empty folder"
        )
    stage.folder.mkdir(parents=True, exist_ok=True)
    link_file(last, stage.teacher)


def restart_head(stage: Stage, save_dir: Path, seed: int) -> None:
    """Replace the latent head in the last checkpoint by a new head, unless the stage has begun to train."""
    last = save_dir / LAST
    if updates_of(last) != stage.begin:
        return
    state = read_contents(last)
    generator = torch.Generator().manual_seed(seed + stage.number)
    for name, weights in state["model"].items():
        if ATOM_PROJECTION in name:
            new = torch.zeros_like(weights)
            if weights.dim() == 2:
                new.normal_(0, INITIAL_DEVIATION, generator=generator)
            state["model"][name] = new
    task_state = state.pop("task_state", None) or {}  # except the words, it is about the codes of the previous stage
    if WORDS in task_state:
        state["task_state"] = {WORDS: task_state[WORDS]}
    save_whole(state, last)


@contextmanager
def measured(record: StepRecord, stage: Stage, part: str) -> Iterator[None]:
    """Record the seconds of the block with those of earlier runs, even if it fails, since the next run resumes."""
    start = time.perf_counter()
    try:
        yield
    finally:
        record.add_seconds(f"stage {stage.number}: {part}", time.perf_counter() - start)


def run_stages(
    stages: Sequence[Stage],
    record: StepRecord,
    *,
    seed: int,
    make_codes: Callable[[Stage], None],
    train: Callable[[Stage], None],
) -> None:
    """Run the missing parts of all stages, in order.

    After the first stage with codes, each stage has other codes and therefore a new latent head, initialized at random
    with ``seed``. ``make_codes`` learns the dictionary of a stage and codes with it, and skips finished work; ``train``
    trains until the end of a stage. The ``record`` lies in the folder of the run.
    """
    save_dir = record.path.parent
    for stage in stages:
        if updates_of(save_dir / LAST) >= stage.end:
            continue
        what = "masked LM" if stage.number == 0 else "masked LM and the codes of the model as it is now"
        part = f"stage {stage.number + 1} of {len(stages)}, updates {stage.begin + 1} to {stage.end}"
        print(f"\n{part}: {what}", flush=True)
        if stage.number > 0:
            begin_stage(stage, save_dir)
            with measured(record, stage, "codes"), in_turn(save_dir):  # the first of several ranks does the work
                make_codes(stage)
        if stage.number > 1:
            restart_head(stage, save_dir, seed)
        with measured(record, stage, "training"):
            train(stage)
