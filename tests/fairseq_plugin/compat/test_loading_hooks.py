"""A checkpoint that a run cannot begin with: which one, why, and what to do, in one line."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.trainer import Trainer

from tests.conftest import CRITERIONS, WITH_AUXILIARY, Pipeline, fairseq_train
from tests.denoising_flags import TINY
from tests.fairseq_plugin.compat.test_version_shims import error_line
from tests.tiny_models import TinyData, positions
from tests.tiny_run import seeded_model, training_config

STATE = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}}


@cache
def config(data: Path, task: str, *flags: object) -> Any:
    more = (*TINY, "--arch", "denoising_small") if task == "span_denoising" else positions(64)
    return training_config(data, *more, *flags, task=task, criterion=CRITERIONS[task])


def trainer_of(data: Path, task: str, *flags: object, save_dir: Path | None = None) -> Any:
    cfg = config(data, task, *flags)
    cfg.checkpoint.save_dir = str(save_dir or "elsewhere")
    own = tasks.setup_task(cfg.task)
    return Trainer(cfg, own, seeded_model(cfg, own), own.build_criterion(cfg.criterion))


def saved(path: Path, trainer: Any) -> Path:
    """A checkpoint after an update that changes nothing."""
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), STATE)
    return path


@pytest.fixture(scope="module")
def mlm(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of plain masked LM with 64 positions."""
    return saved(tmp_path_factory.mktemp("mlm") / "mlm.pt", trainer_of(tiny.data_bin, "plain_masked_lm"))


def problem(trainer: Any, path: Path, **reset: bool) -> str:
    """What is wrong with the checkpoint, behind its name."""
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        trainer.load_checkpoint(str(path), **reset)
    line = str(refused.value)
    assert "\n" not in line
    assert len(line) < 700
    return line.removeprefix(f"{path} ")


def test_another_vocabulary_is_named(tiny: TinyData, mlm: Path, tmp_path: Path) -> None:
    data = tiny.copy(tmp_path / "data")
    with open(data / "dict.txt", "a", encoding="utf-8") as file:
        file.write("another 1\n")
    size = len(trainer_of(tiny.data_bin, "plain_masked_lm").task.source_dictionary)
    for task in ("plain_masked_lm", "taco"):
        assert problem(trainer_of(data, task), mlm, reset_optimizer=True) == (
            f"was trained with a vocabulary of {size} symbols, and dict.txt gives this model {size + 1}; binarize the "
            "text with the tokenizer of the checkpoint"
        )


def test_other_positions_are_named_and_the_advice_works(tiny: TinyData, mlm: Path) -> None:
    line = problem(trainer_of(tiny.data_bin, "plain_masked_lm", "--max-positions", 40), mlm)
    assert line == "has other positions than this model; pass --max-positions 64"
    trainer_of(tiny.data_bin, "plain_masked_lm", "--max-positions", 64).load_checkpoint(str(mlm))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (
            ("--encoder-layers", 3),
            "it lacks 16 weights (first: encoder.sentence_encoder.layers.2.self_attn.k_proj.weigh",
        ),
        (
            ("--encoder-layers", 1),
            "it has 16 others (first: encoder.sentence_encoder.layers.1.self_attn.k_proj.weight)",
        ),
        (("--encoder-embed-dim", 16), "39 have another shape (encoder.sentence_encoder.embed_tokens.weight: "),
    ],
)
def test_other_sizes_are_named(tiny: TinyData, mlm: Path, flags: tuple[object, ...], found: str) -> None:
    line = problem(trainer_of(tiny.data_bin, "plain_masked_lm", *flags), mlm)
    assert line.startswith(f"does not fit this model: {found}")
    assert line.endswith(
        "; pass the architecture of the checkpoint and its sizes (--arch mlsm_roberta_tiny, --task plain_masked_lm)"
    )


def test_a_model_of_another_kind_is_named(tiny: TinyData, mlm: Path, tmp_path: Path) -> None:
    denoising = trainer_of(tiny.data_bin, "span_denoising")
    line = problem(trainer_of(tiny.data_bin, "plain_masked_lm"), saved(tmp_path / "denoising.pt", denoising))
    assert "it lacks 42 weights" in line
    assert line.endswith("(--arch denoising_small, --task span_denoising)")


@pytest.mark.parametrize("task", ["taco", "masked_latent_semantic"])
def test_another_objective_is_named_and_the_advice_works(tiny: TinyData, mlm: Path, task: str) -> None:
    flags = ("--num-atoms", 8) if task == "masked_latent_semantic" else ()
    assert problem(trainer_of(tiny.data_bin, task, *flags), mlm) == (
        f"was trained with --criterion masked_lm, and not {CRITERIONS[task]}; to begin with its weights, pass it to "
        "--finetune-from-model"
    )
    trainer_of(tiny.data_bin, task, *flags).load_checkpoint(str(mlm), reset_optimizer=True)


def test_another_optimizer_is_named(tiny: TinyData, mlm: Path, tmp_path: Path) -> None:
    line = problem(trainer_of(tiny.data_bin, "plain_masked_lm", "--optimizer", "fused_adamw"), mlm)
    assert line.startswith("was trained with --optimizer adam, and not fused_adamw; to begin with its weights, ")
    own = trainer_of(tiny.data_bin, "plain_masked_lm", "--optimizer", "fused_adamw", save_dir=tmp_path)
    last = tmp_path / "checkpoint_last.pt"
    last.write_bytes(mlm.read_bytes())
    assert problem(own, last) == "was trained with --optimizer adam, and not fused_adamw; pass another --save-dir"


def test_averages_of_a_head_of_another_size_are_refused_before_the_first_update(tiny: TinyData, tmp_path: Path) -> None:
    path = saved(tmp_path / "mlsm.pt", trainer_of(tiny.data_bin, "masked_latent_semantic", "--num-atoms", 8))
    same, more, other = (
        trainer_of(tiny.data_bin, "masked_latent_semantic", "--num-atoms", atoms) for atoms in (8, 9, 9)
    )
    assert problem(more, path).startswith("holds the averages of an optimizer for other weights than this model has; ")
    other.load_checkpoint(str(path), reset_optimizer=True)
    assert same.load_checkpoint(str(path))["train_iterator"] == STATE["train_iterator"]


def test_a_checkpoint_that_does_not_exist_is_not_passed_over(tiny: TinyData, tmp_path: Path) -> None:
    trainer = trainer_of(tiny.data_bin, "plain_masked_lm", save_dir=tmp_path)
    for absent in (tmp_path / "absent.pt", tmp_path):
        with pytest.raises(ValueError, match=f"the checkpoint {absent} does not exist"):
            trainer.load_checkpoint(str(absent))
    assert trainer.load_checkpoint(str(tmp_path / "checkpoint_last.pt")) is None  # a run that begins


def test_errors_about_something_else_stay_as_they_are(
    tiny: TinyData, mlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tiny.data_bin, "plain_masked_lm")

    def fail(*unused: object, **more: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(trainer.model, "load_state_dict", fail)
    with pytest.raises(Exception, match="Cannot load model parameters from checkpoint") as raised:
        trainer.load_checkpoint(str(mlm))
    assert isinstance(raised.value.__context__, MemoryError)


BEGIN_WITH_MASKED_LM = ("taco", "masked_latent_semantic", "nonparametric_masked_lm", *WITH_AUXILIARY)


@pytest.mark.slow
@pytest.mark.parametrize("task", CRITERIONS)
def test_every_task_refuses_the_checkpoint_of_another_in_one_line(
    pipeline: Pipeline, tiny: TinyData, mlm: Path, tmp_path: Path, task: str
) -> None:
    needs_pipeline = task in ("masked_latent_semantic", *WITH_AUXILIARY)  # with codes and an auxiliary model
    data = pipeline.data_bin if needs_pipeline else tiny.data_bin
    size = TINY if task == "span_denoising" else (*positions(64), "--arch", "mlsm_roberta_tiny")
    other = mlm
    if task == "plain_masked_lm":
        other = saved(tmp_path / "denoising.pt", trainer_of(tiny.data_bin, "span_denoising"))
    if task in WITH_AUXILIARY:
        size = (*size, "--auxiliary-checkpoint", pipeline.auxiliary)
    for flag in ("--restore-file", "--finetune-from-model"):
        flags = (*size, "--max-update", 1, flag)
        absent = fairseq_train(data, tmp_path / "run", *flags, tmp_path / "no.pt", task=task, check=False)
        assert f"{tmp_path / 'no.pt'} does not exist" in error_line(absent)
        fits = flag == "--finetune-from-model" and task in BEGIN_WITH_MASKED_LM
        if not fits:
            refused = fairseq_train(data, tmp_path / "run", *flags, other, task=task, check=False)
            assert error_line(refused).startswith(f"{other} ")
    assert list((tmp_path / "run").iterdir()) == []
