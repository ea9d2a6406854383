"""The similarity of NPM, and reading from a checkpoint which similarity it was trained with."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from mlsm_plugin.core.losses.span_contrastive import similarities, similarity_of, temperature_of

QUERIES = torch.tensor([[1.0, 0.0], [2.0, -1.0]])
KEYS = torch.tensor([[1.0, 1.0], [0.0, 3.0], [2.0, -1.0]])


def test_scores_of_both_kinds() -> None:
    assert similarities(QUERIES, KEYS, "inner").tolist() == [[1, 0, 2], [1, -3, 5]]
    assert similarities(QUERIES, KEYS, "l2").tolist() == [[-1, -10, -2], [-5, -20, 0]]


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        ({"similarity": "l2", "similarity_temperature": 3.0}, ("l2", 3.0)),
        ({"similarity": "inner", "similarity_temperature": None}, ("inner", 4.0)),
        ({"_name": "masked_lm"}, ("inner", 4.0)),
        (None, ("inner", 4.0)),
    ],
)
def test_what_a_checkpoint_was_trained_with(criterion: object, expected: tuple[str, float]) -> None:
    cfg = OmegaConf.create({"criterion": criterion, "task": {"similarity": "of another owner"}})
    OmegaConf.set_struct(cfg, True)
    assert (similarity_of(cfg), temperature_of(cfg, 16)) == expected
