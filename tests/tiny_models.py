"""A small dataset and models with random weights in well below a second each: no training, no process of its own."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq import tasks

from mlsm_plugin.core.files.model_files import copy_tokenizer
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import write_untrained
from tests.conftest import mlsm
from tests.tiny_run import seeded_model, training_config

# tokens of the longest sample that TinyData.model says it was trained on, and its positions
TRAINED_TOKENS, POSITIONS = 24, 32
MASKED_LM = {"task": "masked_lm", "criterion": "masked_lm"}


@dataclass(frozen=True)
class TinyData:
    """Paths; read only: copy what a test changes.

    ``model`` is a masked LM of two layers, 32 wide, with random weights.
    """

    text: Path
    tokenizer: Path
    data_bin: Path
    model: Path

    def copy(self, folder: Path) -> Path:
        """A copy of the dataset, to change."""
        return shutil.copytree(self.data_bin, folder)


def make_tiny_data(root: Path, text: Path) -> TinyData:
    """The first 120 lines of ``text`` as training and as validation split."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    made = TinyData(root / "text.txt", root / "tokenizer", root / "data-bin", root / "model" / "checkpoint_last.pt")
    made.text.write_text("".join(itertools.islice(lines, 120)), encoding="utf-8")
    mlsm("tokenizer", "--input", made.text, "--vocab-size", 200, "--output", made.tokenizer)
    texts = ("--train", made.text, "--valid", made.text)
    mlsm("binarize", "--tokenizer", made.tokenizer, *texts, "--output", made.data_bin, "--workers", 1)
    save_untrained(made.data_bin, made.model.parent, *positions(POSITIONS, TRAINED_TOKENS), **MASKED_LM)
    return made


def positions(number: int, trained: int | None = None) -> tuple[object, ...]:
    """Flags of a model with so many positions, trained on samples of ``trained`` tokens."""
    return ("--max-positions", number, "--tokens-per-sample", trained or number)


def save_untrained(data_bin: Path, folder: Path, *flags: object, seed: int = 1, **options: Any) -> Path:
    """Write what the --save-dir of a run holds, with the weights that ``seed`` gives; returns the checkpoint."""
    cfg = training_config(data_bin, *flags, **options)
    model = seeded_model(cfg, tasks.setup_task(cfg.task), seed)
    return save_model(cfg, model, folder, data_bin)


def save_model(cfg: Any, model: Any, folder: Path, data_bin: Path) -> Path:
    """As :func:`save_untrained`, of a model that is there."""
    copy_tokenizer(data_bin, folder)
    write_untrained(folder / "checkpoint_last.pt", cfg, model.state_dict())
    return folder / "checkpoint_last.pt"


def save_untrained_npm(tiny: TinyData, folder: Path) -> Path:
    """A model of ``nonparametric_masked_lm`` with 40 positions; returns its checkpoint."""
    options = {"task": "nonparametric_masked_lm", "criterion": "span_contrastive"}
    return save_untrained(tiny.data_bin, folder, *positions(40, TRAINED_TOKENS), **options)
