"""Train a model with an objective of this package in the library's Trainer, and resume after a stop."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from mlsm_plugin.files.atomic_files import atomic_directory
from mlsm_plugin.files.hf_files import first_line, import_transformers, written_by_library
from mlsm_plugin.hidden_states.devices import has_fast_bf16


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is trained; the optimizer is AdamW with betas 0.9 and 0.98.

    Attributes:
        updates: number of updates.
        batch_size: sequences (NPM: groups) of a batch on each device.
        accumulate: batches of an update.
        learning_rate: the largest rate; it rises over ``warmup`` and falls linearly to 0.
        warmup: share of the updates in which the rate rises.
        weight_decay: of AdamW.
        bf16: ``auto`` (where it is fast), ``on`` or ``off``.
        evaluate_every: updates between two evaluations, and between two checkpoints.
        seed: of the order, and of dropout.
        workers: processes that make batches.
        cpu: do not use a GPU.
    """

    updates: int
    batch_size: int = 32
    accumulate: int = 1
    learning_rate: float = 2e-4
    warmup: float = 0.06
    weight_decay: float = 0.01
    bf16: str = "auto"
    evaluate_every: int = 500
    seed: int = 1
    workers: int = 0
    cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("updates", "batch_size", "accumulate", "learning_rate", "evaluate_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name.replace('_', ' ')} must be positive, got {getattr(self, name)}")
        if self.bf16 not in ("auto", "on", "off"):
            raise ValueError(f"bf16 must be auto, on or off, got {self.bf16}")


def train(
    model: Any, tokenizer: Any, datasets: tuple[Dataset, Dataset], collator: Any, settings: TrainingSettings,
    output: str | os.PathLike[str],
) -> dict[str, float]:  # fmt: skip
    """Train, or resume from the last checkpoint, and write the model and its tokenizer to ``output/model``.

    Args:
        model: a model with an objective of this package.
        tokenizer: saved with the model.
        datasets: what is trained on, and what is evaluated on.
        collator: makes the batches of the objective.
        settings: how the model is trained.
        output: folder for the model and, in ``checkpoints``, the Trainer's checkpoints.

    Returns:
        the figures of the last evaluation, in nats.

    Raises:
        ValueError: the loss is not finite at the end.
        OSError: a file cannot be written.
    """
    import_transformers()
    from transformers import Trainer

    from mlsm_plugin.huggingface.trainer_callback import prepare

    checkpoints = Path(output) / "checkpoints"
    arguments = training_arguments(checkpoints, settings)
    trainer = Trainer(model, arguments, train_dataset=datasets[0], eval_dataset=datasets[1], data_collator=collator)
    prepare(trainer)
    with _disk_errors(checkpoints):
        trainer.train(resume_from_checkpoint=last_checkpoint(checkpoints))
    figures = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    if not math.isfinite(figures["loss"]):
        raise ValueError("the loss is not finite; train with a smaller learning rate, or with bf16 off")
    if trainer.is_world_process_zero():
        with atomic_directory(Path(output) / "model") as folder, written_by_library(folder):
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return figures


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn what torch and safetensors raise when a file cannot be written into OSError."""
    from safetensors import SafetensorError

    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        if isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error):
            raise OSError(f"{folder} cannot be written: {first_line(error)}") from error
        raise


def training_arguments(checkpoints: Path, settings: TrainingSettings) -> Any:
    """The ``TrainingArguments`` of some settings."""
    from transformers import TrainingArguments

    device = torch.device("cuda" if torch.cuda.is_available() and not settings.cpu else "cpu")
    return TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=settings.updates,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        warmup_steps=round(settings.warmup * settings.updates),
        lr_scheduler_type="linear",
        weight_decay=settings.weight_decay,
        adam_beta2=0.98,
        bf16=has_fast_bf16(device) if settings.bf16 == "auto" else settings.bf16 == "on",
        eval_strategy="steps",
        eval_steps=settings.evaluate_every,
        save_steps=settings.evaluate_every,
        save_total_limit=1,
        logging_steps=min(100, settings.evaluate_every),
        seed=settings.seed,
        dataloader_num_workers=settings.workers,
        use_cpu=settings.cpu,
        report_to=[],
        remove_unused_columns=False,
    )


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint of a Trainer; those that a kill has left unfinished are removed.

    The Trainer writes ``trainer_state.json`` last.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    while found:
        newest = found.pop()
        try:
            json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            shutil.rmtree(newest, ignore_errors=True)
            continue
        return str(newest)
    return None
