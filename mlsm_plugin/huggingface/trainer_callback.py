"""Additions to the Trainer: the epoch, the parts of the loss, progress bars, and a fix for several ranks."""

import copy
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.hidden_states.hf_encoder import FLOAT32_ONLY
from mlsm_plugin.core.machine.memory import keep_freed_memory
from mlsm_plugin.core.masking.masked_share import samples_to_look_at
from mlsm_plugin.huggingface.checked_parts import check_auxiliary, check_contrast, check_parts, with_inner
from mlsm_plugin.huggingface.epoch_order import (
    check_resumable,
    check_same_samples,
    check_same_targets,
    epoch_of,
    order_by_epoch,
    samples_of_training,
    samples_record,
    seed_of_order,
)
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel
from mlsm_plugin.huggingface.pretraining_sequences import Samples
from mlsm_plugin.huggingface.state_regression_model import StateRegressionModel

NOT_STANDARDIZED = (
    "the layer that predicts hidden states is new, and without train_dataset these are not standardized: state_loss "
    "says nothing, unless the Trainer loads one of its checkpoints; pass train_dataset, or train first"
)
logger = logging.getLogger(__name__)
MEASURED_UPDATES = 10  # after which the length of a training is told


class PretrainingCallback(TrainerCallback):
    """Sets the epoch, which decides the masks, and adds figures such as ``kl`` and ``mlm_loss`` to the Trainer's logs.

    Each figure is a mean over the tokens since the last log, in nats. Without this callback, ``accelerate`` may set a
    wrong epoch, or none.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        train_dataloader: DataLoader[Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Tell the samples how long the training is; ValueError if it would resume at the wrong place."""
        dataset = getattr(train_dataloader, "dataset", None)
        if isinstance(model, PretrainingModel):
            model.forget_parts()
            check_same_targets(state, model.targets_record())
        if train_dataloader is not None and isinstance(dataset, Samples):
            samples = samples_of_training(args, state.max_steps, len(dataset), len(train_dataloader))
            dataset.set_training(seed_of_order(args), samples)
        if train_dataloader is not None and hasattr(train_dataloader, "__len__"):
            check_resumable(args, state, len(train_dataloader))
            record = samples_record(args, dataset, model)
            check_same_samples(state, record, math.ceil(len(train_dataloader) / args.gradient_accumulation_steps))

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader[Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Set the epoch of the sequences."""
        _fix_epoch(getattr(train_dataloader, "dataset", None), epoch_of(state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        """Add the parts of the loss to the logs of training steps."""
        if logs is not None and "loss" in logs and isinstance(model, PretrainingModel):
            parts = model.taken_parts()
            for log in (logs, *state.log_history[-1:]):
                log.update(parts)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        metrics: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Stop if the loss is not finite; before the training, make the ranks train together.

        ValueError if the loss is not finite. The checkpoint of this update is then not written.

        accelerate marks a model as prepared, even if it prepared it only for an evaluation. A later training would not
        prepare it again, and each rank would train a separate model.
        """
        if not math.isfinite((metrics or {}).get("eval_loss", 0.0)):
            if not state.global_step:
                raise ValueError("the model has no finite loss before it is trained; its weights are damaged")
            raise ValueError(
                f"the loss is not finite after {state.global_step} updates; train with a smaller learning rate, or "
                "without bf16, and with another output folder"
            )
        if args.world_size > 1 and not args.fsdp and not args.deepspeed:
            vars(model).pop("_is_accelerate_prepared", None)


class ProgressBars(TrainerCallback):
    """Shows the training and each evaluation with :class:`~mlsm_plugin.core.files.progress.Progress`.

    The Trainer's own bar is off if the log level of transformers only allows errors. A line says how many minutes the
    training takes, as soon as some updates were measured.

    Args:
        tokens_of_update: the mean number of tokens in an update, over all processes; None: tokens a second are not
            shown.
    """

    def __init__(self, tokens_of_update: float | None = None) -> None:
        self._tokens_of_update = tokens_of_update
        self._training: Progress | None = None
        self._evaluation: Progress | None = None
        self._first_update = 0  # of this process, and when it ended
        self._start: float | None = None
        self._loss = ""
        self._speed = ""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start the bar of the training, at the update where it resumes."""
        self._start = None
        self._loss = ""
        self._speed = ""
        if state.is_world_process_zero:
            self._training = Progress(total=state.max_steps, initial=state.global_step, desc="training", unit="update")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Count an update, and show the speed."""
        if self._training is None:
            return
        self._training.update(state.global_step - self._training.n)
        now = time.monotonic()
        if self._start is None:  # the first update also allocates and compiles
            self._start = now
            self._first_update = state.global_step
            return
        updates = state.global_step - self._first_update
        seconds_of_update = (now - self._start) / updates
        if updates == MEASURED_UPDATES:
            _print_minutes(state.max_steps - state.global_step, seconds_of_update)
        if self._tokens_of_update is not None:
            self._speed = f", {self._tokens_of_update / seconds_of_update:,.0f} tokens/s"
        self._describe()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Show the last loss."""
        if logs is not None and "loss" in logs:
            self._loss = f", loss {logs['loss']:.3f}"
            self._describe()

    def _describe(self) -> None:
        if self._training is not None:
            self._training.set_description_str(f"training{self._loss}{self._speed}", refresh=False)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: DataLoader[Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Count a batch of an evaluation."""
        if state.is_world_process_zero and self._evaluation is None:
            batches = len(eval_dataloader) if eval_dataloader is not None else None
            self._evaluation = Progress(total=batches, desc="evaluating", unit="batch", leave=False)
        if self._evaluation is not None:
            self._evaluation.update(1)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """End the bar of an evaluation."""
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """End the bar of the training."""
        if self._training is not None:
            self._training.close()
            self._training = None


class TensorBoardLog(TensorBoardCallback):
    """A log whose file stays open after the training, for the last evaluation.

    tensorboardX names its files by the second, so another file within the same second would replace the first.
    """

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Flush the buffer instead of closing the file."""
        if self.tb_writer is not None:
            self.tb_writer.flush()


def _print_minutes(updates: int, seconds_of_update: float) -> None:
    """Print how long the remaining updates take, if that is more than a minute; a bar on the terminal stays whole."""
    minutes = updates * seconds_of_update / 60
    if minutes >= 1:
        Progress.write(f"about {minutes:.0f} minutes for the other {updates:,} updates", file=sys.stdout)


def _fix_epoch(dataset: object, epoch: int) -> None:
    """Draw the masks of an epoch in a dataset and in the datasets inside it."""
    for inner in with_inner(dataset):
        if isinstance(inner, Samples):
            inner.fix_epoch(epoch)
        elif hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)


def prepare(trainer: Trainer) -> Trainer:
    """Prepare a Trainer, and return it: add the callback before all logging callbacks, and metrics for evaluations.

    The order of the samples depends only on ``args.data_seed`` or ``args.seed``, and on the epoch: a resumed training
    equals an uninterrupted one.

    ValueError if the model has no objective of this package or overflows in the precision of the arguments, the process
    sees several GPUs, the arguments have label smoothing, or as in
    :func:`~mlsm_plugin.huggingface.checked_parts.check_parts`, ``check_auxiliary`` and ``check_contrast``.
    """
    if not isinstance(trainer.model, PretrainingModel):
        raise ValueError(f"{type(trainer.model).__name__} has no objective of this package; use LatentSemanticModel.of")
    check_gpus(trainer.args)
    _warn_of_unequal_ranks(trainer.args)
    keep_freed_memory()
    kind = trainer.model.config.model_type
    if kind in FLOAT32_ONLY and (trainer.args.bf16 or trainer.args.fp16):
        raise ValueError(f"a model of type {kind} overflows in half precision; train it with bf16 and fp16 False")
    if trainer.args.label_smoothing_factor:  # the Trainer then hides the labels from the model
        raise ValueError("label_smoothing_factor replaces the objective by masked LM; set it to 0")
    for name, datasets in (("train_dataset", trainer.train_dataset), ("eval_dataset", trainer.eval_dataset)):
        for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
            if trainer.model.auxiliary_states is not None:
                check_auxiliary(trainer.model.auxiliary_states.encoder, dataset, trainer.data_collator, name)
            check_parts(trainer.model, dataset, trainer.data_collator, name)
    check_contrast(trainer)
    _standardize(trainer)
    order_by_epoch(trainer)
    trainer.eval_dataset = _with_fixed_masks(trainer.eval_dataset, trainer.train_dataset)
    trainer.callback_handler.callbacks.insert(0, PretrainingCallback())
    trainer.compute_metrics = loss_metrics(trainer.model)
    return trainer


def _standardize(trainer: Trainer) -> None:
    """Standardize the hidden states to predict by those of the training text, if the model predicts hidden states."""
    model = trainer.model
    dataset: Any = trainer.train_dataset
    if not isinstance(model, StateRegressionModel):
        return
    if dataset is None:
        if not model.regression.is_standardized:
            logger.warning(NOT_STANDARDIZED)
        return
    if not hasattr(dataset, "__len__"):
        raise ValueError("train_dataset has no length; hidden states are standardized by those of a sample of it")
    places = samples_to_look_at(len(dataset))
    model.standardize(trainer.data_collator([dataset[index]]) for index in places)


def _with_fixed_masks(eval_dataset: Any, train_dataset: object) -> Any:
    """The evaluation dataset with the masks of epoch 0; a copy if it shares sequences with the training dataset."""
    if isinstance(eval_dataset, dict):
        return {name: _with_fixed_masks(dataset, train_dataset) for name, dataset in eval_dataset.items()}
    training_ids = {id(inner) for inner in with_inner(train_dataset)}
    if any(id(inner) in training_ids for inner in with_inner(eval_dataset)):
        eval_dataset = copy.deepcopy(eval_dataset)
    _fix_epoch(eval_dataset, 0)
    return eval_dataset


def check_gpus(arguments: TrainingArguments) -> None:
    """Raise ValueError if the Trainer would split batches by row over GPUs; codes, pairs and spans do not split."""
    if arguments.n_gpu > 1:
        raise ValueError(
            f"this process sees {arguments.n_gpu} GPUs; start one for each with torchrun --nproc-per-node "
            f"{arguments.n_gpu}, or make only one visible with CUDA_VISIBLE_DEVICES=0"
        )


def _warn_of_unequal_ranks(arguments: TrainingArguments) -> None:
    """Log a warning if losses are means over the tokens of a rank, as by default before version 5 of transformers."""
    if arguments.world_size > 1 and not arguments.average_tokens_across_devices:
        logger.warning(
            "average_tokens_across_devices is off: tokens of a rank with fewer masked tokens count more than others; "
            "set it in the TrainingArguments"
        )


def loss_metrics(model: PretrainingModel) -> Callable[[EvalPrediction], dict[str, float]]:
    """A function for the Trainer's ``compute_metrics``: the parts of the loss as means over all tokens, in nats."""

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        return model.means_of(np.asarray(prediction.predictions, np.float64).sum(axis=0))

    return compute
