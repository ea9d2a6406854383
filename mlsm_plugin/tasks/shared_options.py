"""The options that the tasks of this package have in common."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum
from omegaconf import II, MISSING

from mlsm_plugin.tasks.autocast import AutocastConfig

SAMPLE_BREAK_MODES = ChoiceEnum(["none", "complete", "complete_doc", "eos"])
SAMPLE_BREAK_MODE_HELP = (
    "where samples end (none: anywhere; complete: after a sentence; complete_doc: after a sentence or a document; eos: "
    "after each sentence); a sentence that is too long for a sample is cut into pieces"
)


@dataclass
class SavedRunConfig(AutocastConfig):
    """Options for the seed, for saving a run, for its loader processes, and for the precision of its steps."""

    seed: int = II("common.seed")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")
    reuse_dataloader: bool = field(
        default=False,
        metadata={
            "help": "keep loader processes from epoch to epoch, as fairseq does by default; they only know the number "
            "of the first epoch, so that every epoch draws the same masks or spans"
        },
    )


@dataclass
class TextBlocksConfig(SavedRunConfig):
    """Options for cutting a binarized dataset into samples, for tasks that are not based on masked LM."""

    data: str = field(
        default=MISSING, metadata={"help": "binarized dataset, or several joined by colons, which epochs use in turn"}
    )
    sample_break_mode: SAMPLE_BREAK_MODES = field(  # type: ignore[valid-type]
        default="complete", metadata={"help": SAMPLE_BREAK_MODE_HELP}
    )
    tokens_per_sample: int = field(default=256, metadata={"help": "maximum number of tokens of a sample, BOS included"})


def all_that_fit(dataset: Any, indices: Any, max_positions: Any) -> Any:
    """``indices``, if all samples fit; tasks that cut text into samples leave none of it out.

    Args:
        dataset: the samples.
        indices: numbers of samples ``(n,)``.
        max_positions: the longest sample that the options allow, as ``dataset.filter_indices_by_size`` takes it.

    Raises:
        ValueError: a sample is longer.
    """
    fitting, others = dataset.filter_indices_by_size(indices, max_positions)
    if len(others):
        raise ValueError(
            f"{len(others)} of {len(indices)} samples are longer than --max-positions or --max-tokens allow "
            f"({max_positions}), and no text is left out; raise these options, or lower --tokens-per-sample"
        )
    return fitting
