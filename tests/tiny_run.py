"""Configurations, models and batches as fairseq-train makes them, in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from fairseq import tasks

import mlsm_plugin  # noqa: F401  (registers)
from tests.composed_once import configuration_of
from tests.conftest import TINY_MODEL, TINY_TRAINING

T = TypeVar("T")


def training_config(
    data: object,
    *flags: object,
    task: str = "masked_latent_semantic",
    criterion: str = "latent_semantic_kl",
    arch: str = "mlsm_roberta_tiny",
) -> Any:
    """What fairseq-train's options become; later flags override the tiny ones."""
    words = [data, "--task", task, "--criterion", criterion, *TINY_MODEL, *TINY_TRAINING, "--arch", arch, *flags]
    return configuration_of([str(word) for word in words])


def seeded_model(cfg: Any, task: Any, seed: int = 1) -> Any:
    """The model of ``cfg``, in training mode, with the weights that ``seed`` gives."""
    torch.manual_seed(seed)
    return task.build_model(cfg.model)


def each_batch(
    cfg: Any, split: str = "train", *, epoch: int = 1, combine: bool = False, task: Any = None
) -> Iterator[Any]:
    """The batches of an epoch, in the order of training; each is collated when it is asked for."""
    task = task or tasks.setup_task(cfg.task)
    if split not in task.datasets:
        task.load_dataset(split, epoch=epoch, combine=combine)
    iterator = task.get_batch_iterator(
        task.dataset(split), max_sentences=8, max_positions=10_000, seed=cfg.common.seed, epoch=epoch
    )
    return iter(iterator.next_epoch_itr(shuffle=True))


def batches(cfg: Any, split: str = "train", **options: Any) -> list[Any]:
    """All of :func:`each_batch`, which takes seconds for a large split."""
    return list(each_batch(cfg, split, **options))


def in_torch_ddp(model: Any, folder: Path, steps: Callable[[Any], T]) -> T:
    """What ``steps`` returns of the model in torch's DistributedDataParallel, in a group of this process alone.

    The wrapper is gone before its group is: as the last owner of a group it would end the group's threads with the
    interpreter's lock in hand, which one of them may be waiting for.
    """
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        return steps(torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=False))
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()
