"""What the Trainer does not do by itself: the epoch, the parts of the loss, ranks after an evaluation."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import Trainer, TrainerCallback, TrainingArguments

from mlsm_plugin.core.hidden_states.hf_encoder import FLOAT32_ONLY
from mlsm_plugin.core.machine.memory import keep_freed_memory
from mlsm_plugin.huggingface.checked_parts import check_contrast, check_parts, with_inner
from mlsm_plugin.huggingface.epoch_order import (
    check_resumable,
    check_same_samples,
    epoch_of,
    order_by_epoch,
    samples_record,
)
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel
from mlsm_plugin.huggingface.pretraining_sequences import Samples


class PretrainingCallback(TrainerCallback):
    """Sets the epoch, which decides the masks, and adds ``kl``, ``mlm_loss`` and the like to what the Trainer logs.

    Each figure is a mean over the tokens since the last log, in nats. Without this callback, ``accelerate`` may set
    another epoch, or none.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Raise ValueError if the training would resume at another place."""
        if hasattr(train_dataloader, "__len__"):
            check_resumable(args, state, len(train_dataloader))
            record = samples_record(args, getattr(train_dataloader, "dataset", None), model)
            check_same_samples(state, record, math.ceil(len(train_dataloader) / args.gradient_accumulation_steps))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Set the epoch of the sequences."""
        _fix_epoch(getattr(train_dataloader, "dataset", None), epoch_of(state))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any) -> None:
        """Add the parts of the loss to the logs of training steps."""
        if logs is not None and "loss" in logs and isinstance(model, PretrainingModel):
            parts = model.taken_parts()
            for log in (logs, *state.log_history[-1:]):
                log.update(parts)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, model: Any = None, metrics: Any = None, **_: Any
    ) -> None:
        """Let no training go on without a finite loss; before the training, let the ranks train together.

        ValueError if the loss is not finite. The checkpoint of this update is then not written.

        accelerate marks a model that it has prepared, also if it did so for an evaluation only. A training that follows
        then takes it as it is: each rank would train a model of its own.
        """
        if not math.isfinite((metrics or {}).get("eval_loss", 0.0)):
            raise ValueError(
                f"the loss is not finite after {state.global_step} updates; train with a smaller --learning-rate, or "
                "with --bf16 off, and with another --output"
                if state.global_step
                else "the model has no finite loss before it is trained; its weights are damaged"
            )
        if args.world_size > 1 and not args.fsdp and not args.deepspeed:
            vars(model).pop("_is_accelerate_prepared", None)


def _fix_epoch(dataset: Any, epoch: int) -> None:
    """Draw the masks of an epoch in a dataset, and in those within it."""
    for inner in with_inner(dataset):
        if isinstance(inner, Samples):
            inner.fix_epoch(epoch)
        elif hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)


def prepare(trainer: Trainer) -> Trainer:
    """The Trainer, with the callback before those that report its logs, and the parts of the loss in evaluations.

    The order of the samples depends on ``args.data_seed`` or ``args.seed``, and on the epoch, only. A training that
    resumes then equals one that never stopped.

    ValueError if its model has no objective of this package or overflows in the precision of its arguments, its process
    sees several GPUs, its arguments have label smoothing, or as of
    :func:`~mlsm_plugin.huggingface.checked_parts.check_parts` and ``check_contrast``.
    """
    if not isinstance(trainer.model, PretrainingModel):
        raise ValueError(f"{type(trainer.model).__name__} has no objective of this package; use LatentSemanticModel.of")
    check_gpus(trainer.args)
    keep_freed_memory()
    kind = trainer.model.config.model_type
    if kind in FLOAT32_ONLY and (trainer.args.bf16 or trainer.args.fp16):
        raise ValueError(f"a model of type {kind} overflows in half precision; train it with bf16 and fp16 False")
    if trainer.args.label_smoothing_factor:  # the Trainer then hides the labels from the model
        raise ValueError("label_smoothing_factor replaces the objective by masked LM; set it to 0")
    for name, datasets in (("train_dataset", trainer.train_dataset), ("eval_dataset", trainer.eval_dataset)):
        for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
            check_parts(trainer.model, dataset, trainer.data_collator, name)
    check_contrast(trainer)
    order_by_epoch(trainer)
    trainer.eval_dataset = _with_fixed_masks(trainer.eval_dataset, trainer.train_dataset)
    trainer.callback_handler.callbacks.insert(0, PretrainingCallback())
    trainer.compute_metrics = loss_metrics(trainer.model)
    return trainer


def _with_fixed_masks(evaluated: Any, trained: Any) -> Any:
    """What is evaluated, with the masks of epoch 0; a copy, if it shares sequences with what is trained on."""
    if isinstance(evaluated, dict):
        return {name: _with_fixed_masks(dataset, trained) for name, dataset in evaluated.items()}
    of_training = {id(inner) for inner in with_inner(trained)}
    if any(id(inner) in of_training for inner in with_inner(evaluated)):
        evaluated = copy.deepcopy(evaluated)
    _fix_epoch(evaluated, 0)
    return evaluated


def check_gpus(arguments: TrainingArguments) -> None:
    """Raise ValueError if the Trainer would split batches by rows over GPUs: codes, pairs and spans are no rows."""
    if arguments.n_gpu > 1:
        raise ValueError(
            f"this process sees {arguments.n_gpu} GPUs; start one for each with torchrun --nproc-per-node "
            f"{arguments.n_gpu}, or show it one with CUDA_VISIBLE_DEVICES=0"
        )


def loss_metrics(model: PretrainingModel) -> Callable[[Any], dict[str, float]]:
    """A function for the Trainer's ``compute_metrics``: the parts of the loss, as means over all tokens, in nats."""

    def compute(prediction: Any) -> dict[str, float]:
        return model.means_of(np.asarray(prediction.predictions, np.float64).sum(axis=0))

    return compute
