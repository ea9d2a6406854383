"""Each task refuses the criterions and the models of other tasks."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from fairseq import tasks

from mlsm_plugin.fairseq_plugin.tasks.plugin_task import PluginTask
from tests.conftest import CRITERIONS
from tests.tiny_models import TinyData
from tests.tiny_run import training_config

FITTING = {
    "plain_masked_lm": {"masked_lm", "latent_semantic_kl"},
    "masked_latent_semantic": {"latent_semantic_kl", "masked_lm"},
    "taco": {"token_contrastive", "masked_lm"},
    "nonparametric_masked_lm": {"span_contrastive"},
    "span_denoising": {"cross_entropy", "label_smoothed_cross_entropy"},
    "state_regression": {"state_regression"},
    "sentence_vectors": {"sentence_vectors"},
}
TRIED = {*CRITERIONS.values(), "label_smoothed_cross_entropy", "sentence_prediction", "ctc", "wav2vec"}


@pytest.fixture(scope="module", params=CRITERIONS)
def task(request: pytest.FixtureRequest, tiny: TinyData) -> Any:
    arch = "denoising_small" if request.param == "span_denoising" else "mlsm_roberta_tiny"
    cfg = training_config(tiny.data_bin, task=request.param, criterion=CRITERIONS[request.param], arch=arch)
    return tasks.setup_task(cfg.task)


def test_criterions_of_other_tasks_are_refused(task: Any) -> None:
    name = next(name for name, one in tasks.TASK_REGISTRY.items() if one is type(task))
    for criterion in sorted(TRIED - FITTING[name]):
        with pytest.raises(
            ValueError, match=f"--criterion {criterion} does not compute the loss of --task {name}; pass"
        ):
            task.build_criterion(Namespace(_name=criterion))


def test_models_of_another_structure_are_refused(task: Any) -> None:
    denoising = "denoising" in type(task).__name__.lower()
    wrong = {"mlsm_modern_tiny", "roberta", "transformer_lm"} if denoising else {"transformer", "bart_base", "lstm_lm"}
    for arch in wrong:
        with pytest.raises(
            ValueError, match=rf"--arch {arch} is an? .*coder, and --task \w+ trains .* such as --arch "
        ):
            PluginTask.build_model(task, Namespace(_name=arch))


def test_the_latent_loss_needs_codes_and_a_latent_head(tiny: TinyData) -> None:
    def build(task: str, *flags: object, arch: str = "mlsm_roberta_tiny") -> Any:
        cfg = training_config(tiny.data_bin, *flags, task=task, arch=arch)
        own = tasks.setup_task(cfg.task)
        cfg.model.num_atoms = 8
        own.build_model(cfg.model)
        return own.build_criterion(cfg.criterion)

    with pytest.raises(
        ValueError, match="--criterion latent_semantic_kl needs the codes of --task masked_latent_seman"
    ):
        build("plain_masked_lm")
    assert build("plain_masked_lm", "--latent-weight", 0, "--mlm-weight", 1).mlm_weight == 1
    with pytest.raises(
        ValueError, match="--criterion latent_semantic_kl needs a model with a latent head: pass --arch"
    ):
        build("masked_latent_semantic", arch="roberta")
    assert build("masked_latent_semantic").latent_weight == 1
