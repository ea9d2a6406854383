"""What ``fairseq-train`` cannot do is one line before it begins, in each task of this package."""

from __future__ import annotations

import math
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, optim, options
from fairseq.data import data_utils
from fairseq.optim import lr_scheduler

from mlsm_plugin.fairseq_plugin.compat import version_shims
from mlsm_plugin.fairseq_plugin.compat.training_options import check_options
from tests.conftest import CRITERIONS, TINY_TRAINING, fairseq_train, logged
from tests.denoising_flags import SIZE
from tests.fairseq_plugin.compat.test_version_shims import error_line
from tests.tiny_models import TinyData

WORDS = ("data", "--task", "plain_masked_lm", "--criterion", "masked_lm", "--arch", "mlsm_roberta_tiny", *TINY_TRAINING)
ARCHS = {"span_denoising": "denoising_small"}
POLYNOMIAL = {"lr_scheduler": "polynomial_decay", "total_num_update": 10}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": None}, "a batch has no size; pass --batch-size with samples, or --max-tokens with tokens"),
    *(({name: 0}, f"--{name.replace('_', '-')} must be at least 1, got 0") for name in ("batch_size", "max_tokens")),
    ({"batch_size_valid": "0"}, "--batch-size-valid must be at least 1, got 0"),
    ({"required_batch_size_multiple": 0}, "--required-batch-size-multiple must be at least 1, got 0"),
    ({"update_freq": [2, 0]}, "--update-freq must be at least 1, got 0"),
    ({"log_interval": 0}, "--log-interval must be at least 1, got 0"),
    ({"save_interval": 0}, "--save-interval must be at least 1, got 0"),
    ({"validate_interval": 0}, "--validate-interval must be at least 1, got 0"),
    ({"num_workers": -1}, "--num-workers must be at least 0, got -1"),
    ({"max_update": -1}, "--max-update must be at least 0, got -1"),
    ({"max_epoch": -2}, "--max-epoch must be at least 0, got -2"),
    ({"seed": -1}, "--seed must be from 0 to 4294967295, got -1"),
    ({"seed": 2**32}, "--seed must be from 0 to 4294967295, got"),
    ({"tokens_per_sample": 1}, "--tokens-per-sample must be at least 2, got 1"),
    ({"max_positions": -3}, "--max-positions must be at least 0, got -3"),
    ({"model_parallel_size": 2}, "--model-parallel-size must be from 1 to 1, got 2"),
    ({"dropout": 1.5}, "--dropout must be from 0 to 1, got 1.5"),
    ({"leave_unmasked_prob": 2.0}, "--leave-unmasked-prob must be from 0 to 1, got 2"),
    ({"leave_unmasked_prob": 0.6, "random_token_prob": 0.6}, "--leave-unmasked-prob 0.6 and --random-token-prob 0.6 "),
    ({"encoder_embed_dim": 0}, "--encoder-embed-dim must be at least 1, got 0"),
    ({"encoder_attention_heads": 3}, "is not a multiple of --encoder-attention-heads 3"),
    *(({"lr": [value]}, f"--lr must be a number from 0, got {value:g}") for value in (-1, math.nan, math.inf)),
    ({"optimizer": None}, "--optimizer is missing; pass one, such as --optimizer fused_adamw"),
    ({**POLYNOMIAL, "total_num_update": None}, "needs --total-num-update; pass --total-num-update N"),
    ({**POLYNOMIAL, "total_num_update": None, "max_update": 70}, "pass --total-num-update 70"),
    ({**POLYNOMIAL, "total_num_update": 0}, "--total-num-update must be at least 1, got 0"),
    ({**POLYNOMIAL, "warmup_updates": 20}, "--warmup-updates 20 are more than --total-num-update 10"),
    *(
        ({"valid_subset": names}, f"--valid-subset {names!r} names an empty split")
        for names in ("", "valid, test", "a,")
    ),
    ({"finetune_from_model": "a.pt", "restore_file": "b.pt"}, "pass only one of them"),
    (
        {"finetune_from_model": "a.pt", "reset_meters": True},
        "resets everything but the weights; leave out --reset-meters",
    ),
    ({"finetune_from_model": "absent.pt"}, "--finetune-from-model absent.pt does not exist"),
    ({"data": "data:absent"}, "absent has no split train, and epochs alternate between the folders; binarize"),
]


@pytest.fixture(scope="module")
def parsed() -> Namespace:
    """The options of a run that is right."""
    return options.parse_args_and_arch(options.get_training_parser(), list(WORDS))


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_what_cannot_be_is_named(parsed: Namespace, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_options(parsed, WORDS)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        check_options(Namespace(**{**vars(parsed), "save_dir": str(tmp_path), **changes}), WORDS)
    assert "\n" not in str(refused.value)


def test_a_rate_that_nobody_named_is_refused(parsed: Namespace) -> None:
    without = [word for word in WORDS if word not in ("--lr", "1e-3")]
    with pytest.raises(ValueError, match=r"--lr is missing, and fairseq would use 0\.25; pass one, such as --lr 1e-3"):
        check_options(parsed, without)
    check_options(parsed, [*without, "--lr=1e-3"])


def test_a_process_of_several_that_would_train_alone_is_refused(
    parsed: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    args, words = Namespace(**{**vars(parsed), "distributed_world_size": 1}), ["--lr", "1e-3"]
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4, .*; pass --distributed-world-size 4"):
        check_options(args, words)
    check_options(args, [*words, "--distributed-world-size", "1"])
    check_options(Namespace(**{**vars(args), "distributed_world_size": 4}), words)


@pytest.mark.parametrize("task", CRITERIONS)
def test_the_command_checks_the_options_of_each_task(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["data", "--task", task, "--criterion", CRITERIONS[task], "--arch", ARCHS.get(task, "mlsm_roberta_tiny")]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *words, "--optimizer", "adam", "--lr", "1e-3"])
    with pytest.raises(ValueError, match="a batch has no size"):
        options.parse_args_and_arch(options.get_training_parser())
    sys.argv += ["--batch-size", "8"]
    assert options.parse_args_and_arch(options.get_training_parser()).task == task


def test_options_of_other_tasks_and_programs_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["data", "--task", "masked_lm", "--criterion", "masked_lm", "--arch", "mlsm_roberta_tiny"]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *words])
    assert options.parse_args_and_arch(options.get_training_parser()).batch_size is None
    own = ["data", "--task", "plain_masked_lm", *words[3:]]
    assert options.parse_args_and_arch(options.get_training_parser(), own).batch_size is None


def test_an_architecture_that_nobody_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fairseq-train", "data", "--task", "taco"])
    with pytest.raises(ValueError, match="--arch is missing; pass one, such as --arch mlsm_modern_small"):
        options.parse_args_and_arch(options.get_training_parser())


def with_second_validation_set(data: Path, name: str = "valid1") -> Path:
    for ending in ("bin", "idx"):
        shutil.copy(data / f"valid.{ending}", data / f"{name}.{ending}")
    return data


def test_validation_sets_that_would_not_be_used_are_named(tiny: TinyData, tmp_path: Path) -> None:
    def check(data: Path, subsets: str = "valid", **chosen: bool) -> None:
        names = ("ignore_unused_valid_subsets", "combine_valid_subsets", "disable_validation")
        dataset = Namespace(**{**dict.fromkeys(names, False), "valid_subset": subsets, **chosen})
        cfg = Namespace(dataset=dataset, task=Namespace(data=str(data)))
        data_utils.raise_if_valid_subsets_unintentionally_ignored(cfg)

    data = with_second_validation_set(tiny.copy(tmp_path / "data"))
    advice = f"{data} also has valid1; pass --valid-subset valid,valid1 to validate on each, --combine-valid-subsets"
    with pytest.raises(ValueError, match=re.escape(advice)):
        check(data)
    check(data, "valid,valid1")
    check(data, combine_valid_subsets=True)
    check(data, ignore_unused_valid_subsets=True)
    with pytest.raises(ValueError, match="absent does not exist"):
        check(tmp_path / "absent")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="Not a directory") as raised:
            checkpoint_utils.verify_checkpoint_directory(str(folder))
        shown = version_shims._text_for_user(raised.value)
        assert shown is not None
        assert shown.startswith(f"{folder}")
        assert shown.endswith(": Not a directory")
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "new"))


def test_options_of_optimizers_and_schedules_are_named() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    adam = {
        "adam_betas": "(0.9, 0.98)",
        "adam_eps": 1e-6,
        "weight_decay": 0.0,
        "decay_matrices_only": False,
        "lr": [1.0],
    }
    with pytest.raises(ValueError, match=r"^--optimizer fused_adamw: --adam-betas must be in .*, --adam-eps positive"):
        optim.build_optimizer(Namespace(optimizer="fused_adamw", **{**adam, "adam_eps": 0.0}), weights)
    optimizer = optim.build_optimizer(Namespace(optimizer="fused_adamw", **adam), weights)
    schedule = Namespace(lr_scheduler="triangular", lr=[1.0], max_lr=0.5, lr_period_updates=9, lr_shrink=0.1)
    with pytest.raises(ValueError, match=r"^--lr-scheduler triangular: max_lr must be more than lr$"):
        lr_scheduler.build_lr_scheduler(schedule, optimizer)


@pytest.mark.slow
def test_what_the_line_about_a_second_validation_set_advises_works(tiny: TinyData, tmp_path: Path) -> None:
    data = with_second_validation_set(tiny.copy(tmp_path / "data"))
    more = {
        ("--valid-subset", "valid,valid1"): ["valid", "valid1"],
        ("--combine-valid-subsets",): ["valid"],
        ("--ignore-unused-valid-subsets",): ["valid"],
    }
    counts = []
    for flags, subsets in more.items():
        result = fairseq_train(data, tmp_path / "save", "--max-update", 1, "--no-save", *flags, task="taco")
        assert re.findall(r"begin validation on \"(\w+)\" subset", result.stdout + result.stderr) == subsets
        counts.append(len(logged(result, "loss", where="valid")))
    assert counts == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("task", CRITERIONS)
def test_a_run_without_a_batch_size_or_on_a_criterion_of_another_task_is_one_line(
    tiny: TinyData, tmp_path: Path, task: str
) -> None:
    size = SIZE if task == "span_denoising" else ()
    other = "masked_lm" if task in ("span_denoising", "nonparametric_masked_lm") else "cross_entropy"
    refused = fairseq_train(tiny.data_bin, tmp_path / "a", *size, "--batch-size", 0, task=task, check=False)
    assert error_line(refused) == "--batch-size must be at least 1, got 0"
    flags = ("--criterion", other, "--num-atoms", 8) if task == "masked_latent_semantic" else ("--criterion", other)
    refused = fairseq_train(tiny.data_bin, tmp_path / "b", *size, *flags, task=task, check=False)
    assert error_line(refused).startswith(
        f"--criterion {other} does not compute the loss of --task {task}; pass --crit"
    )
    assert not list(tmp_path.glob("*/*"))
