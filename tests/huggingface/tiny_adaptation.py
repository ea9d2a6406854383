"""A small BERT with random weights and a short text, to adapt it to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForMaskedLM

from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.files.step_record import RECORD, StepRecord
from mlsm_plugin.huggingface import Adaptation, TrainingSettings
from mlsm_plugin.huggingface.adaptation_setup import AdaptationSetup
from tests.tiny_hf_models import make_model

LINES = 200
LENGTH = 32


def write_start(root: Path, text: Path) -> None:
    """Write ``text.txt``, ``valid.txt`` and a BERT of 200 positions in ``model``."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)[:LINES]
    (root / "text.txt").write_text("".join(lines), encoding="utf-8")
    (root / "valid.txt").write_text("".join(lines[:20]), encoding="utf-8")
    make_model("bert", root / "text.txt", root / "model", kind=AutoModelForMaskedLM, max_position_embeddings=200)


def setup_of(start: Path, output: Path, **more: Any) -> AdaptationSetup:
    """The setup of an adaptation on a CPU to ``text.txt``, with other settings as passed."""
    training = TrainingSettings(cpu=True, bf16="off", batch_size=4, updates=2)
    settings = {"texts": [str(start / "text.txt")], "max_length": LENGTH, "training": training, **more}
    adaptation = Adaptation(str(start / "model"), output=str(output), **settings)
    return AdaptationSetup(adaptation, ProcessRank(), StepRecord(output / RECORD))
