"""Training with fairseq-hydra-train from the YAML files in examples/."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import mlsm_plugin  # noqa: F401  (registers)
from mlsm_plugin import hub
from tests.conftest import REPOSITORY, Pipeline, fairseq_train, logged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python")]

# the one of examples/huggingface holds options of Hugging Face's Trainer
WITHOUT_FAIRSEQ = ("huggingface", "datatrove")
EXAMPLES = sorted(path for path in (REPOSITORY / "examples").rglob("*.yaml") if path.parent.name not in WITHOUT_FAIRSEQ)
LEFT_BEHIND_BY_HYDRA = ("outputs", "multirun", ".hydra", "hydra_train.log")


def hydra_train(*overrides: str, example: str = "mlsm") -> subprocess.CompletedProcess[str]:
    """The documented command, in the repository's root as documented."""
    command = [
        sys.executable,
        "-m",
        "fairseq_cli.hydra_train",
        "--config-dir",
        f"examples/{example}",
        "--config-name",
        example,
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1"}
    result = subprocess.run(
        [*command, *overrides], capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def test_yaml_trains_exactly_as_the_flags_do_and_the_model_loads(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny = (
        *("model._name=mlsm_roberta_tiny", "+model.encoder_layers=2", "+model.encoder_embed_dim=32"),
        *("+model.encoder_ffn_embed_dim=64", "+model.encoder_attention_heads=2", "common.cpu=true"),
        *("dataset.batch_size=8", "optimization.update_freq=[2]", "dataset.num_workers=0", "common.log_interval=1"),
        *("optimization.max_update=4", "lr_scheduler.total_num_update=4", "lr_scheduler.warmup_updates=2"),
        *("optimization.lr=[0.001]",),
        *("criterion.mlm_weight=0.5", "task.tokens_per_sample=64", f"task.data={pipeline.data_bin}"),
    )
    flags = (
        *("--max-positions", 512, "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-8", "--weight-decay", 0.01),
        *("--lr-scheduler", "polynomial_decay", "--warmup-updates", 2, "--total-num-update", 4, "--lr", "1e-3"),
        *("--clip-norm", 1.0, "--update-freq", 2, "--max-update", 4, "--mlm-weight", 0.5, "--no-save"),
        *("--autocast", "auto"),
    )
    with ThreadPoolExecutor(2) as pool:
        by_flags = pool.submit(fairseq_train, pipeline.data_bin, tmp_path / "flags", *flags)
        by_yaml = pool.submit(hydra_train, *tiny, f"checkpoint.save_dir={tmp_path / 'yaml'}")
        in_bf16 = pool.submit(hydra_train, *tiny, f"checkpoint.save_dir={tmp_path / 'bf16'}", "common.bf16=true")

    assert len(logged(by_flags.result(), "loss")) == 4
    for name in ("loss", "kl", "mlm_loss", "gnorm", "lr"):
        assert logged(by_yaml.result(), name) == logged(by_flags.result(), name)
    for name in ("loss", "kl", "mlm_loss"):
        assert logged(by_yaml.result(), name, where="valid") == logged(by_flags.result(), name, where="valid")
    assert float(logged(in_bf16.result(), "kl")[0]) == pytest.approx(
        float(logged(by_flags.result(), "kl")[0]), rel=0.02
    )

    assert [name for name in LEFT_BEHIND_BY_HYDRA if (REPOSITORY / name).exists()] == []
    model = hub.from_pretrained(tmp_path / "yaml")
    assert model.num_atoms == 48
    assert len(model.latent_properties("This is a statement.", topk=2)) >= 4


def test_taco_trains_from_its_yaml_in_bf16_too(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny = (
        *("+model.encoder_layers=2", "+model.encoder_embed_dim=32", "+model.encoder_ffn_embed_dim=64"),
        *("+model.encoder_attention_heads=2", "common.cpu=true", "common.log_interval=1", "dataset.batch_size=8"),
        *("optimization.update_freq=[2]", "optimization.max_update=3", "lr_scheduler.warmup_updates=1"),
        *("task.tokens_per_sample=64", "dataset.num_workers=0", f"task.data={pipeline.data_bin}"),
    )
    with ThreadPoolExecutor(2) as pool:
        exact = pool.submit(hydra_train, *tiny, f"checkpoint.save_dir={tmp_path / 'exact'}", example="taco")
        rounded = pool.submit(
            hydra_train, *tiny, f"checkpoint.save_dir={tmp_path / 'bf16'}", "common.bf16=true", example="taco"
        )
    for name in ("mlm_loss", "contrastive_loss", "loss"):
        expected, found = ([float(value) for value in logged(run.result(), name)] for run in (exact, rounded))
        assert len(expected) == 3
        assert found == pytest.approx(expected, rel=0.02)
    for folder in ("exact", "bf16"):
        assert len(hub.from_pretrained(tmp_path / folder).fill_mask("This is a <mask>.", topk=2)) == 2


def check_known(config: Any) -> None:
    """Raise where a key of a Hydra configuration exists nowhere, or its value is of a wrong type."""
    fields = {field.name: field for field in dataclasses.fields(FairseqConfig)}
    for group, section in config.items():
        if group in ("hydra", "defaults"):
            continue
        if group not in fields:
            raise ValueError(f"fairseq has no section {group}")
        name = section.get("_name")
        without_dataclass = group in REGISTRIES and name not in REGISTRIES[group]["dataclass_registry"]
        if group == "model" or without_dataclass:
            owner = ARCH_MODEL_REGISTRY[name] if group == "model" else REGISTRIES[group]["registry"][name]
            unknown = sorted(set(section) - options_of(owner) - {"lr" if group == "optimizer" else ""})
            if unknown:
                raise ValueError(f"{name} has no options {unknown}")
            continue
        if group == "task":
            schema = TASK_DATACLASS_REGISTRY[name]
        elif group in REGISTRIES:
            schema = REGISTRIES[group]["dataclass_registry"][name]
        else:
            schema = fields[group].default
        OmegaConf.merge(OmegaConf.structured(schema), section)


def options_of(owner: Any) -> set[str]:
    """What the command line takes for an architecture or an optimizer that has no dataclass."""
    parser = argparse.ArgumentParser(add_help=False)
    owner.add_args(parser)
    return {"_name", *(action.dest for action in parser._actions)}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_key_of_the_example_configurations_exists(path: Path) -> None:
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    check_known(config)
    assert {"task", "criterion", "model", "optimizer", "lr_scheduler", "optimization"} <= set(config)


@pytest.mark.parametrize(
    "mistake",
    [
        "task.token_per_sample=1", "criterion.mlmweight=1", "model.dropuot=0", "optimizer.adam_beta=1", "commn.seed=1",
        "dataset.batchsize=8", "optimization.max_update=many",
    ],
)  # fmt: skip
def test_check_of_the_example_configurations_finds_mistakes(mistake: str) -> None:
    config = OmegaConf.load(REPOSITORY / "examples" / "mlsm" / "mlsm.yaml")
    with pytest.raises((ValueError, OmegaConfBaseException)):
        check_known(OmegaConf.merge(config, OmegaConf.from_dotlist([mistake])))


def test_example_configuration_is_the_published_recipe() -> None:
    config = OmegaConf.load(REPOSITORY / "examples" / "mlsm" / "mlsm.yaml")
    assert config.model._name == "mlsm_roberta_medium"
    assert config.dataset.batch_size * config.optimization.update_freq[0] == 1024
    assert (config.optimization.max_update, list(config.optimization.lr)) == (270_000, [1e-4])
    assert (config.lr_scheduler._name, config.lr_scheduler.total_num_update) == ("polynomial_decay", 300_000)
    assert (config.task.tokens_per_sample, config.criterion.latent_weight) == (128, 1.0)


def test_taco_configuration_is_the_published_small_model() -> None:
    config = OmegaConf.load(REPOSITORY / "examples" / "taco" / "taco.yaml")
    assert config.model._name == "taco_small"
    assert (config.dataset.batch_size, list(config.optimization.update_freq)) == (128, [4])
    assert (config.optimization.max_update, list(config.optimization.lr)) == (1_000_000, [1e-4])
    assert (config.lr_scheduler._name, config.lr_scheduler.warmup_updates) == ("polynomial_decay", 10_000)
    assert config.task.tokens_per_sample == 256
    assert (config.criterion.negatives, config.criterion.temperature) == (50, 0.07)
