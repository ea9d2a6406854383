"""The epochs of fine-tuning in the Trainer: which epoch is the best, and when the training ends."""

import math
import sys
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.evaluation.settings import FinetuneSettings
from mlsm_plugin.huggingface.training import TRAINER_STATE, last_checkpoint


class Epochs(TrainerCallback):
    """Prints the results of each epoch, and ends the training after ``patience`` epochs without a better result."""

    def __init__(self, settings: FinetuneSettings) -> None:
        self._settings = settings

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Correct the path of the best checkpoint, in case the folder was moved."""
        if state.best_model_checkpoint is not None:
            state.best_model_checkpoint = str(Path(str(args.output_dir), Path(state.best_model_checkpoint).name))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Print the results. ValueError if the loss is not finite; the checkpoint of this epoch is then not written."""
        epochs = _evaluations(state)
        figures = epochs[-1]
        if not math.isfinite(figures["eval_loss"]):
            raise ValueError(
                f"the loss is not finite after epoch {len(epochs)}; train with a smaller --lr and another --output"
            )
        measure = "pearson" if self._settings.regression else self._settings.metric
        shown = f"loss {figures['eval_loss']:.4f}, {measure} {figures[f'eval_{measure}']:.4f}"
        Progress.write(f"  epoch {len(epochs)}: {shown}", file=sys.stdout)  # beside the bar of the training
        sys.stdout.flush()
        if _has_ended(state, self._settings):
            control.should_training_stop = True


def is_over(checkpoint: Path, settings: FinetuneSettings) -> bool:
    """Whether the training that wrote a checkpoint is finished."""
    return _has_ended(_state_of(checkpoint), settings)


def best_checkpoint(checkpoints: Path, settings: FinetuneSettings) -> Path:
    """The checkpoint of the best epoch; the first of equally good epochs."""
    last = last_checkpoint(checkpoints)
    assert last is not None, f"{checkpoints} has no checkpoint"
    epochs = _evaluations(_state_of(Path(last)))
    return checkpoints / f"checkpoint-{epochs[_best(epochs, settings)]['step']}"


def _state_of(checkpoint: Path) -> TrainerState:
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))


def _evaluations(state: TrainerState) -> list[dict[str, float]]:
    """The figures of each epoch on the validation texts."""
    return [figures for figures in state.log_history if "eval_loss" in figures]


def _best(epochs: list[dict[str, float]], settings: FinetuneSettings) -> int:
    """The index of the best epoch."""
    scores = [figures[f"eval_{settings.best_in}"] for figures in epochs]
    return scores.index(min(scores) if settings.regression else max(scores))


def _has_ended(state: TrainerState, settings: FinetuneSettings) -> bool:
    epochs = _evaluations(state)
    since_best = len(epochs) - 1 - _best(epochs, settings)
    return len(epochs) >= settings.max_epoch or since_best >= settings.patience
