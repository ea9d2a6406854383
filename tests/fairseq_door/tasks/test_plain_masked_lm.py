"""Plain masked LM: the batches and losses of fairseq's task."""

from __future__ import annotations

import pytest
import torch
from fairseq import tasks
from fairseq.tasks.masked_lm import MaskedLMTask

from mlsm_plugin.fairseq_door.tasks.portable_masked_lm import PlainMaskedLMTask
from tests.tiny_models import TinyData, positions
from tests.tiny_run import batches, seeded_model, training_config


@pytest.mark.parametrize("mode", ["none", "complete"])
def test_losses_are_those_of_fairseqs_task(tiny: TinyData, mode: str) -> None:
    found = {}
    for name, expected in (("masked_lm", MaskedLMTask), ("plain_masked_lm", PlainMaskedLMTask)):
        flags = (*positions(320), "--sample-break-mode", mode, "--batch-size", 4)  # no sentence is longer
        cfg = training_config(tiny.data_bin, *flags, task=name, criterion="masked_lm", arch="mlsm_modern_tiny")
        task = tasks.setup_task(cfg.task)
        assert type(task) is expected
        model, criterion = seeded_model(cfg, task), task.build_criterion(cfg.criterion)
        found[name] = torch.stack([criterion(model, sample)[0] for sample in batches(cfg, task=task)])
    torch.testing.assert_close(found["plain_masked_lm"], found["masked_lm"])
