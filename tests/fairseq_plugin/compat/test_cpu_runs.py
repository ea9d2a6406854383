"""Runs on the CPU: a GPU that is there is left alone, and a precision that needs one is refused in one line."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import utils as fairseq_utils

from mlsm_plugin.cli.main import main
from mlsm_plugin.fairseq_plugin.compat.training_options import SLURM_NODES, check_number_of_processes, check_precision
from tests.conftest import CRITERIONS, Pipeline, fairseq_train
from tests.tiny_models import TinyData, positions
from tests.tiny_run import training_config

# a user's folder on a machine of two GPUs; as with real ones, the environment can hide them
TWO_GPUS = """
import os, torch

def refuse(name):
    def used(*arguments):
        raise RuntimeError(f"a GPU was used: {name}")
    return used

torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
torch.cuda.device_count = lambda: 2 if torch.cuda.is_available() else 0
for name in ("current_device", "set_device", "get_rng_state", "set_rng_state", "manual_seed"):
    setattr(torch.cuda, name, refuse(name))

import mlsm_plugin
"""


def gradients(seed: int, *shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return found


@pytest.mark.parametrize("largest", [0.0, 0.5, 100.0])
def test_gradients_on_the_cpu_are_clipped_there_on_a_machine_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, largest: float
) -> None:
    shapes = ((3, 4), (5,), (2, 2, 2))
    expected = gradients(1, *shapes)
    norm = torch.nn.utils.clip_grad_norm_(expected, largest or float("inf"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    clipped = gradients(1, *shapes)
    clipped[2].expert = True  # type: ignore[attr-defined]  # as fairseq: scaled with the others, not measured
    without = torch.nn.utils.get_total_norm([parameter.grad for parameter in clipped[:2]])
    found = fairseq_utils.clip_grad_norm_(clipped, largest)
    torch.testing.assert_close(found, without)
    factor = 1.0 if largest == 0 else min(1.0, largest / float(without))
    for parameter, original in zip(clipped, gradients(1, *shapes), strict=True):
        torch.testing.assert_close(parameter.grad, factor * original.grad)
    own = gradients(1, *shapes)
    torch.testing.assert_close(fairseq_utils.clip_grad_norm_(iter(own), largest), norm)
    for parameter, other in zip(own, expected, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_on_the_cpu_uses_no_gpu(tiny: TinyData, tmp_path: Path) -> None:
    (tmp_path / "two_gpus").mkdir()
    (tmp_path / "two_gpus" / "__init__.py").write_text(TWO_GPUS)
    flags = ("--max-update", 1, "--clip-norm", 1, *positions(64))
    result = fairseq_train(tiny.data_bin, tmp_path, *flags, task="plain_masked_lm", user_dir=tmp_path / "two_gpus")
    assert "training on 1 devices" in result.stdout + result.stderr


@pytest.mark.parametrize("cpu", [False, True])
def test_fp16_needs_a_gpu(tiny: TinyData, monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    common = training_config(tiny.data_bin).common
    common.cpu = cpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cpu)  # no GPU at all, or one that is not asked for
    check_precision(common)
    common.fp16 = True
    with pytest.raises(ValueError, match=r"--fp16 trains on a GPU.* pass --autocast bf16 in its place"):
        check_precision(common)
    for trains in ("memory_efficient_fp16", "fp16_no_flatten_grads"):
        check_precision(SimpleNamespace(**{**common, trains: True}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    common.cpu = False
    check_precision(common)


def test_the_flag_bf16_needs_a_tpu(tiny: TinyData, monkeypatch: pytest.MonkeyPatch) -> None:
    common = training_config(tiny.data_bin, "--bf16").common
    for there in (False, True):  # a GPU
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        with pytest.raises(ValueError, match=r"--bf16 trains on a TPU.* pass --autocast bf16 in its place"):
            check_precision(common)
    common.tpu = False  # as with Hydra's common.bf16=true, which trains on every device
    check_precision(common)


def test_fairseq_starts_a_process_for_each_gpu_only(tiny: TinyData, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", *SLURM_NODES):
        monkeypatch.delenv(name, raising=False)
    distributed = training_config(tiny.data_bin).distributed_training
    for gpus in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        distributed.distributed_world_size = max(1, gpus)
        check_number_of_processes(distributed)
    distributed.distributed_world_size = 3
    with pytest.raises(ValueError, match="is 3, and there are 2 GPUs; pass 2, or start the run with torchrun"):
        check_number_of_processes(distributed)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    check_number_of_processes(distributed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="is 3, and there is no GPU; start each process yourself, with --distributed"):
        check_number_of_processes(distributed)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    check_number_of_processes(distributed)
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    distributed.distributed_init_method = "tcp://localhost:29500"
    check_number_of_processes(distributed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "flag"), zip(CRITERIONS, itertools.cycle(("--fp16", "--bf16", "--memory-efficient-bf16")))
)
def test_it_is_one_line_before_data_are_loaded(tiny: TinyData, tmp_path: Path, task: str, flag: str) -> None:
    result = fairseq_train(tiny.data_bin, tmp_path, flag, task=task, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].endswith("pass --autocast bf16 in its place (in the tasks of mlsm_plugin)")
    assert "dictionary" not in result.stdout + result.stderr


@pytest.mark.slow
def test_commands_that_hand_flags_on_show_the_line(
    pipeline: Pipeline, tmp_path: Path, capfd: pytest.CaptureFixture[str], warm_python: Path
) -> None:
    for words in (
        ("auxiliary", pipeline.data_bin, "--save-dir", tmp_path / "auxiliary", "--fp16", "--cpu"),
        ("pretrain", pipeline.data_bin, "--save-dir", tmp_path / "pretrain", "--bf16", "--cpu", "--device", "cpu"),
    ):
        assert main([str(word) for word in words]) == 1
        shown = capfd.readouterr().err
        assert "Traceback" not in shown
        assert shown.count("pass --autocast bf16 in its place") == 1
