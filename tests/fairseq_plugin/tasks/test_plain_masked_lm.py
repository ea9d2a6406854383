"""Plain masked LM: the samples and losses of fairseq's task, without special tokens, in batches that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.tasks.masked_lm import MaskedLMTask

from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import PlainMaskedLMTask
from tests.fairseq_plugin.stock_batches import known_masks, samples_of, stock_batches
from tests.tiny_models import TinyData, positions
from tests.tiny_run import batches, seeded_model, training_config

FLAGS = (*positions(320), "--batch-size", 4)  # no sentence is longer


def parts(tiny: TinyData, name: str, mode: str, *more: object) -> tuple[Any, Any, Any, Any]:
    """Configuration, task, model and criterion."""
    flags = (*FLAGS, "--sample-break-mode", mode, *more)
    cfg = training_config(tiny.data_bin, *flags, task=name, criterion="masked_lm", arch="mlsm_modern_tiny")
    task = tasks.setup_task(cfg.task)
    return cfg, task, seeded_model(cfg, task), task.build_criterion(cfg.criterion)


@pytest.mark.parametrize("mode", ["none", "complete"])
def test_losses_are_those_of_fairseqs_task(tiny: TinyData, mode: str) -> None:
    cfg, task, model, criterion = parts(tiny, "plain_masked_lm", mode)
    _, stock_task, stock_model, stock_criterion = parts(tiny, "masked_lm", mode)
    assert (type(task), type(stock_task)) == (PlainMaskedLMTask, MaskedLMTask)
    samples = batches(cfg, task=task)
    found = torch.stack([criterion(model, sample)[0] for sample in samples])
    torch.testing.assert_close(found, torch.stack([stock_criterion(stock_model, sample)[0] for sample in samples]))


def test_samples_are_those_of_fairseqs_task_and_special_tokens_are_not_predicted(tiny: TinyData) -> None:
    cfg, task, _, _ = parts(tiny, "plain_masked_lm", "complete")
    found = samples_of(batches(cfg, task=task))
    stock = samples_of(stock_batches(tiny.data_bin, *FLAGS, "--sample-break-mode", "complete"))
    assert found.keys() == stock.keys()
    for index, sample in found.items():
        assert all(torch.equal(*pair) for pair in zip(sample, known_masks(stock[index]), strict=True))
    special = torch.tensor([0, 2])
    predicted = torch.cat([target for _, target in found.values()])
    assert not bool(torch.isin(predicted, special).any())
    assert bool(torch.isin(torch.cat([target for _, target in stock.values()]), special).any())


def test_batches_hold_other_samples_in_each_epoch_and_the_same_after_a_resume(tiny: TinyData) -> None:
    def groups(epoch: int) -> list[tuple[int, ...]]:
        cfg, task, _, _ = parts(tiny, "plain_masked_lm", "none", "--tokens-per-sample", 12)
        return [tuple(sorted(batch["id"].tolist())) for batch in batches(cfg, task=task, epoch=epoch)]

    first, second = groups(1), groups(2)
    assert len(first) == len(second) > 10
    assert sorted(sum(first, ())) == sorted(sum(second, ()))
    assert len({*first} & {*second}) < len(first) / 4
    assert groups(2) == second  # as a process that resumes makes them
    assert groups(1) == first
