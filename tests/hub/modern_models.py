"""Small models of ``mlsm_modern`` with weights that make every part of them matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fairseq import tasks

from tests.tiny_models import positions, save_model
from tests.tiny_run import seeded_model, training_config

POSITIONS = 48
PLAIN = {"task": "plain_masked_lm", "criterion": "masked_lm"}
NPM = {"task": "nonparametric_masked_lm", "criterion": "span_contrastive"}
# a window that is shorter than the samples, and angles that tell local layers from global ones
WINDOW = (
    *("--encoder-layers", 4, "--attention-window", 8, "--global-attention-every", 3),
    *("--rope-theta", 160000, "--local-rope-theta", 500),
)


def spread_weights(model: torch.nn.Module) -> None:
    """Draw weights that are larger than at the start of a training, also of norms and biases."""
    torch.manual_seed(2)
    for name, values in model.named_parameters():
        torch.nn.init.normal_(values, mean=1.0 if "norm" in name else 0.0, std=0.3)


def save_modern(data_bin: Path, folder: Path, *flags: object, **options: Any) -> Path:
    """Write what the --save-dir of a run with ``mlsm_modern`` holds; returns the checkpoint."""
    flags = (*positions(POSITIONS), *flags)
    cfg = training_config(data_bin, *flags, arch="mlsm_modern_tiny", **(options or PLAIN))
    model = seeded_model(cfg, tasks.setup_task(cfg.task))
    spread_weights(model)
    return save_model(cfg, model, folder, data_bin)
