"""Which epoch of a fine-tuning is the best, and when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from mlsm_plugin.evaluation.settings import FinetuneSettings
from mlsm_plugin.evaluation.training_epochs import Epochs, best_checkpoint, is_over


def saved(folder: Path, scores: list[float], name: str = "accuracy") -> Path:
    """The newest checkpoint of a training whose epochs, of 10 updates, have these scores."""
    state = TrainerState()
    for epoch, score in enumerate(scores, 1):
        state.log_history += [{"loss": 0.5, "step": 10 * epoch}, {"eval_loss": 0.5, f"eval_{name}": score}]
        state.log_history[-1]["step"] = 10 * epoch
        state.global_step = 10 * epoch
    checkpoint = folder / f"checkpoint-{state.global_step}"
    checkpoint.mkdir(parents=True)
    state.save_to_json(str(checkpoint / "trainer_state.json"))
    return checkpoint


@pytest.mark.parametrize(
    ("scores", "over", "best"),
    [
        ([0.5], False, 10),
        ([0.5, 0.4], False, 10),
        ([0.5, 0.6, 0.6, 0.5], True, 20),  # the first of equal ones, two epochs ago
        ([0.5, 0.6, 0.5, 0.7], False, 40),
        ([0.1, 0.2, 0.3, 0.4, 0.5], True, 50),
    ],
)
def test_patience_counts_epochs_without_a_better_one(
    tmp_path: Path, scores: list[float], over: bool, best: int
) -> None:
    settings = FinetuneSettings(max_epoch=5, patience=2)
    assert is_over(saved(tmp_path, scores), settings) is over
    assert best_checkpoint(tmp_path, settings) == tmp_path / f"checkpoint-{best}"


def test_the_best_epoch_of_a_regression_has_the_smallest_loss(tmp_path: Path) -> None:
    saved(tmp_path, [0.5, 0.3, 0.4], "loss")
    assert best_checkpoint(tmp_path, FinetuneSettings(regression=True)) == tmp_path / "checkpoint-20"


def test_an_evaluation_is_printed_and_ends_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    epochs = Epochs(FinetuneSettings(patience=1))
    state, control = TrainerState(), TrainerControl()
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    for score, stops in ((0.5, False), (0.6, False), (0.6, True)):
        state.log_history.append({"eval_loss": 0.25, "eval_accuracy": score})
        epochs.on_evaluate(arguments, state, control)
        assert control.should_training_stop is stops
    assert capsys.readouterr().out.splitlines()[-1] == "  epoch 3: loss 0.2500, accuracy 0.6000"
    state.log_history.append({"eval_loss": float("nan"), "eval_accuracy": 0.5})
    with pytest.raises(ValueError, match="the loss is not finite after epoch 4; train with a smaller --lr"):
        epochs.on_evaluate(arguments, state, control)
