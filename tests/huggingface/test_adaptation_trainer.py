"""What the Trainer of each objective is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mlsm_plugin.huggingface import (
    AuxiliaryTextCollator,
    MaskedLmCollator,
    PretrainingSequences,
    SpanGroups,
    SpanGroupsCollator,
    TokenContrastiveCollator,
)
from mlsm_plugin.huggingface.adaptation_text import AdaptationText
from mlsm_plugin.huggingface.adaptation_trainer import TrainerParts
from tests.huggingface.tiny_adaptation import setup_of


def parts_of(start: Path, output: Path, **settings: object) -> TrainerParts:
    setup = setup_of(start, output, **settings)
    return TrainerParts(setup, AdaptationText(setup))


@pytest.mark.parametrize(
    ("objective", "loss", "collator", "dataset"),
    [
        ("mlm", "mlm_loss", MaskedLmCollator, PretrainingSequences),
        ("regression+mlm", "state_loss", AuxiliaryTextCollator, PretrainingSequences),
        ("taco", "contrastive_loss", TokenContrastiveCollator, PretrainingSequences),
        ("npm", "start_loss", SpanGroupsCollator, SpanGroups),
        ("distill", "teacher_kl", MaskedLmCollator, PretrainingSequences),
    ],
)
def test_an_objective_has_its_loss_collator_and_datasets(
    start: Path, tmp_path: Path, objective: str, loss: str, collator: type, dataset: type
) -> None:
    teacher = str(start / "model") if objective == "distill" else None
    parts = parts_of(start, tmp_path, objective=objective, teacher=teacher)
    trainer = parts.trainer
    assert parts.trainer is trainer
    assert trainer.model is parts.model
    assert type(trainer.data_collator) is collator
    assert type(trainer.train_dataset) is type(trainer.eval_dataset) is dataset
    assert trainer.args.max_steps == 2
    assert f"eval_{loss}" in trainer.evaluate()


def test_new_weights_depend_only_on_the_seed(start: Path, tmp_path: Path) -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(parts_of(start, tmp_path, student="1x64").model.state_dict())
    assert all(torch.equal(values, states[1][name]) for name, values in states[0].items())
