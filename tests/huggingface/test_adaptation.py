"""The steps of an adaptation in their order; test_adapt of the command runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.huggingface import adaptation
from tests.huggingface.tiny_adaptation import setup_of


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, "text before training"),
        ({"column": "body"}, "documents text before training"),
        ({"objective": "mlsm"}, "text dictionary codes before training"),
        ({"objective": "mlsm+mlm", "latent_source": "online"}, "text dictionary before training"),
        ({"objective": "regression+mlm"}, "text before training"),
        ({"objective": "distill-vectors"}, "text vectors before training"),
        ({"student": "1x64", "vocab_size": 300}, "tokenizer text before training"),
        (
            {"student": "1x64", "vocab_size": 300, "objective": "mlsm", "column": "body"},
            "documents tokenizer text alignment dictionary codes before training",
        ),
    ],
)
def test_an_objective_has_its_steps_in_order(start: Path, tmp_path: Path, settings: dict[str, Any], names: str) -> None:
    if settings.get("objective") == "distill-vectors":
        settings = {**settings, "teacher": str(start / "model")}
    steps = adaptation._Chain(setup_of(start, tmp_path, **settings)).steps()
    assert [step.name for step in steps] == names.split()
    outputs = [output for step in steps for output in step.outputs]
    assert len(set(outputs)) == len(outputs)
    assert not list(tmp_path.iterdir())  # a list of steps makes nothing


@pytest.mark.parametrize("name", ["accuracy", "contrastive_accuracy"])
def test_a_higher_accuracy_is_no_higher_loss(name: str) -> None:
    assert adaptation._losses_fell({"mlm_loss": 3.0, name: 0.1}, {"mlm_loss": 2.0, name: 0.2})
    assert not adaptation._losses_fell({"mlm_loss": 3.0, name: 0.1}, {"mlm_loss": 3.5, name: 0.2})
