"""What the Trainer does not do by itself: the epoch, the parts of the loss, ranks after an evaluation."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from transformers import Trainer, TrainerCallback, TrainingArguments

from mlsm_plugin.core.hidden_states.hf_encoder import FLOAT32_ONLY
from mlsm_plugin.core.masking.masked_share import check_masked_share, samples_to_look_at
from mlsm_plugin.huggingface.collators import MaskedLmCollator, SpanGroupsCollator
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel


class PretrainingCallback(TrainerCallback):
    """Sets the epoch, which decides the masks, and adds ``kl``, ``mlm_loss`` and the like to what the Trainer logs.

    Each figure is a mean over the tokens since the last log, in nats. Without this callback, a sequence has the same
    masks in every epoch, since the Trainer tells the epoch to its own sampler only.
    """

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Set the epoch of the sequences."""
        for dataset in _with_inner(getattr(train_dataloader, "dataset", None)):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(int(state.epoch or 0))

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


def _with_inner(dataset: Any) -> Iterator[Any]:
    """A dataset, and those within torch's ``Subset`` and ``ConcatDataset``."""
    yield dataset
    for inner in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if inner is not None:
            yield from _with_inner(inner)


def prepare(trainer: Trainer) -> Trainer:
    """The Trainer, with the callback before those that report its logs, and the parts of the loss in evaluations.

    ValueError if its model has no objective of this package or overflows in the precision of its arguments, its process
    sees several GPUs, its arguments have label smoothing, its sequences were made with a tokenizer of another
    vocabulary than the collator's, or hardly anything of its text is masked.
    """
    if not isinstance(trainer.model, PretrainingModel):
        raise ValueError(f"{type(trainer.model).__name__} has no objective of this package; use LatentSemanticModel.of")
    check_gpus(trainer.args)
    kind = trainer.model.config.model_type
    if kind in FLOAT32_ONLY and (trainer.args.bf16 or trainer.args.fp16):
        raise ValueError(f"a model of type {kind} overflows in half precision; train it with bf16 and fp16 False")
    if trainer.args.label_smoothing_factor:  # the Trainer then hides the labels from the model
        raise ValueError("label_smoothing_factor replaces the objective by masked LM; set it to 0")
    for name, datasets in (("train_dataset", trainer.train_dataset), ("eval_dataset", trainer.eval_dataset)):
        for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
            _check_text(name, dataset, trainer.data_collator)
    trainer.callback_handler.callbacks.insert(0, PretrainingCallback())
    trainer.compute_metrics = loss_metrics(trainer.model)
    return trainer


def _check_text(name: str, dataset: Any, collator: Any) -> None:
    """Check the vocabulary of sequences, and :func:`check_masked_share`; collators of others are not judged."""
    if not isinstance(collator, (MaskedLmCollator, SpanGroupsCollator)):
        return
    for one in _with_inner(dataset):
        made_with = getattr(getattr(one, "sequences", None), "about", {}).get("tokenizer")
        if made_with not in (None, collator.vocabulary):
            raise ValueError(
                f"the sequences of {name} were made with a tokenizer of another vocabulary than that of the collator: "
                "the same ids mean other tokens; pass the tokenizer that made them to the collator"
            )
    if hasattr(dataset, "__len__"):
        batches = (collator([dataset[index]]) for index in samples_to_look_at(len(dataset)))
        counts = (collator.masked_counts(batch) for batch in batches)
        check_masked_share(name, counts, collator.mask_prob, remedy=collator.few_masks)


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
