from __future__ import annotations

import pytest

from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import configuration_of
from tests import composed_once
from tests.conftest import CRITERIONS, TINY_MODEL, TINY_TRAINING


@pytest.mark.parametrize("task", CRITERIONS)
def test_it_is_the_configuration_that_fairseq_makes(task: str) -> None:
    model = ("--arch", "denoising_small") if task == "span_denoising" else TINY_MODEL
    decay = ("--optimizer", "fused_adamw", "--lr-scheduler", "polynomial_decay", "--total-num-update", 9, "--seed", 7)
    options = ("--task", task, "--criterion", CRITERIONS[task], *TINY_TRAINING, *model, *decay)
    words = ["data", *map(str, options)]
    found = composed_once.configuration_of(words)
    assert str(found) == str(configuration_of(words))
    found.common.seed = 3
    assert composed_once.configuration_of(words).common.seed == 7
