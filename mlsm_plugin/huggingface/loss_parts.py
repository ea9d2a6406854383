"""The parts of a loss in the Trainer's logs and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import Trainer, TrainerCallback

from mlsm_plugin.huggingface.pretraining_model import PretrainingModel


class LossParts(TrainerCallback):
    """Adds the parts of the loss, such as ``kl`` and ``mlm_loss``, to what the Trainer logs; in nats.

    Each is a mean over the tokens since the last log. Pass it as ``callbacks=[LossParts()]``; to have the parts in
    TensorBoard and the like, too, use :func:`log_loss_parts`.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any) -> None:
        """Add the parts to the logs of training steps."""
        if logs is None or "loss" not in logs or not isinstance(model, PretrainingModel):
            return
        parts = model.taken_parts()
        logs.update(parts)
        if state.log_history:
            state.log_history[-1].update(parts)


def log_loss_parts(trainer: Trainer) -> None:
    """Let a Trainer log the parts of the loss wherever it logs, and in its evaluations.

    Raises:
        ValueError: its model has no objective of this package.
    """
    if not isinstance(trainer.model, PretrainingModel):
        raise ValueError(f"{type(trainer.model).__name__} has no objective of this package; use LatentSemanticModel.of")
    trainer.callback_handler.callbacks.insert(0, LossParts())
    trainer.compute_metrics = loss_metrics(trainer.model)


def loss_metrics(model: PretrainingModel) -> Callable[[Any], dict[str, float]]:
    """A function for the Trainer's ``compute_metrics``: the parts of the loss, as means over all tokens; in nats."""

    def compute(prediction: Any) -> dict[str, float]:
        return model.means_of(np.asarray(prediction.predictions, np.float64).sum(axis=0))

    return compute
