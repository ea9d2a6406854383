"""The options that tasks have in common mean the same everywhere, and keep their defaults."""

from __future__ import annotations

import dataclasses

import pytest
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from mlsm_plugin.fairseq_plugin.tasks.plugin_task import SavedRunConfig
from tests.conftest import CRITERIONS, Pipeline
from tests.tiny_run import training_config

TASKS = sorted(CRITERIONS)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_the_options_of_a_saved_run(pipeline: Pipeline, task: str) -> None:
    options = TASK_DATACLASS_REGISTRY[task]
    assert issubclass(options, SavedRunConfig)
    arch = "denoising_small" if task == "span_denoising" else "mlsm_roberta_tiny"
    flags = ("--save-dir", "here", "--seed", 7, "--no-save", "--reuse-dataloader")
    cfg = training_config(pipeline.data_bin, *flags, task=task, criterion=CRITERIONS[task], arch=arch)
    assert (cfg.task.save_dir, cfg.task.seed, cfg.task.no_save) == ("here", 7, True)
    assert cfg.task.reuse_dataloader is True
    assert options().reuse_dataloader is False


def test_defaults_of_the_blocks() -> None:
    found = {
        task: (options.sample_break_mode, options.tokens_per_sample)
        for task in TASKS
        for options in (TASK_DATACLASS_REGISTRY[task]().__class__,)
    }
    assert {task: (str(mode), tokens) for task, (mode, tokens) in found.items()} == {
        "plain_masked_lm": ("none", 1024),
        "masked_latent_semantic": ("none", 1024),
        "taco": ("none", 1024),
        "nonparametric_masked_lm": ("complete", 256),
        "span_denoising": ("none", 512),
        "state_regression": ("none", 1024),
        "sentence_vectors": ("eos", 256),
    }


@pytest.mark.parametrize("task", TASKS)
def test_no_option_belongs_to_a_task_and_to_its_criterion(task: str) -> None:
    own = {field.name for field in dataclasses.fields(TASK_DATACLASS_REGISTRY[task])}
    loss = {field.name for field in dataclasses.fields(CRITERION_DATACLASS_REGISTRY[CRITERIONS[task]])}
    assert own & loss <= {"_name", "seed"}
