"""Settings of a training, and which checkpoint it resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import Trainer, TrainerCallback

from mlsm_plugin.core.files.settings import identity
from mlsm_plugin.huggingface.collators import MaskedLmCollator
from mlsm_plugin.huggingface.pretraining_model import MaskedLmModel
from mlsm_plugin.huggingface.pretraining_sequences import PretrainingSequences
from mlsm_plugin.huggingface.trainer_callback import prepare
from mlsm_plugin.huggingface.training import TrainingSettings, last_checkpoint, train
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert


class Damage(TrainerCallback):
    """Makes a weight not finite after the third update."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 3:
            model.cls.predictions.bias.data.fill_(float("nan"))


def trainer_of(folder: Path, model: Any = None, **settings: Any) -> Any:
    data, tokenizer = PretrainingSequences(random_ids(16)), make_tokenizer()
    options = {"updates": 4, "batch_size": 4, "evaluate_every": 2, "bf16": "off", "cpu": True, **settings}
    arguments, both = TrainingSettings(**options).arguments(folder), {"train_dataset": data, "eval_dataset": data}
    model = model or MaskedLmModel.of(tiny_bert())
    return prepare(Trainer(model, arguments, data_collator=MaskedLmCollator(tokenizer), **both))


@pytest.mark.slow
def test_training_learns_and_resumes(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "checkpoints", learning_rate=1e-2)
    before = trainer.evaluate()["eval_loss"]
    figures = train(trainer)
    assert figures["mlm_loss"] < before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-4"]
    assert train(trainer_of(tmp_path / "checkpoints", learning_rate=1e-2))["loss"] == figures["loss"]


def one_layer() -> MaskedLmModel:
    """A model that is compiled in half of the time."""
    return MaskedLmModel.of(tiny_bert(num_hidden_layers=1))


@pytest.mark.slow
def test_a_compiled_model_learns_the_same_and_its_weights_keep_their_names(tmp_path: Path) -> None:
    losses, names = [], []
    for choice in ("off", "on"):
        losses.append(train(trainer_of(tmp_path / choice, one_layer(), compile=choice, learning_rate=1e-3))["loss"])
        with safe_open(tmp_path / choice / "checkpoint-4" / "model.safetensors", "pt") as weights:
            names.append(set(weights.keys()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert names[1] == names[0]
    resumed = trainer_of(tmp_path / "on", one_layer(), compile="off", learning_rate=1e-3)
    assert train(resumed)["loss"] == pytest.approx(losses[1])


def test_an_epoch_is_a_pass_over_all_sequences(tmp_path: Path) -> None:
    settings = {"batch_size": 6, "accumulate": 2}  # 16 sequences: batches of 6, 6 and 4, updates of 2 batches and 1
    updates = TrainingSettings(**settings).updates_of_epochs(3, 16, 1)
    trainer = trainer_of(tmp_path, updates=updates, **settings)
    trainer.train()
    assert trainer.state.epoch == 3
    assert TrainingSettings(**settings).updates_of_epochs(2, 25, 2) == 4
    assert TrainingSettings(**settings).updates_of_epochs(0.01, 16, 1) == 1


def test_unfinished_checkpoints_are_not_resumed(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "nothing") is None
    for number, state in (("9", "{}"), ("10", "{"), ("11", None), ("x", "{}")):
        name = f"checkpoint-{number}"
        (tmp_path / name).mkdir()
        if state is not None:
            (tmp_path / name / "trainer_state.json").write_text(state, encoding="utf-8")
    assert last_checkpoint(tmp_path, tidy=False) == str(tmp_path / "checkpoint-9")
    assert len(list(tmp_path.iterdir())) == 4
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-9", "checkpoint-x"}


def test_a_loss_that_is_not_finite_is_one_line(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.add_callback(Damage())
    with pytest.raises(ValueError, match=r"the loss is not finite after 4 updates; .*, and with another output folder"):
        train(trainer)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]  # the last good one stays
    with pytest.raises(ValueError, match="no finite loss before it is trained; its weights are damaged"):
        trainer_of(tmp_path, model=trainer.model).evaluate()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"muon_learning_rate": 0.1}, "muon_learning_rate needs --optimizer muon"),
        ({"updates": 0}, "updates must be positive"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"workers": -1}, "workers must be at least 0"),
        ({"warmup": 2.0}, "warmup must be from 0 to 1"),
        ({"bf16": "maybe"}, "bf16 must be one of auto, on, off"),
    ],
)
def test_settings_out_of_range_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**settings)


def test_what_decides_the_result_is_in_the_plan() -> None:
    first = TrainingSettings(workers=0, cpu=True)
    assert identity(first) == identity(TrainingSettings(workers=3))
    assert identity(first) != identity(TrainingSettings(seed=2))


@pytest.mark.parametrize(
    ("length", "size"), [(16, 32), (128, 32), (129, 16), (256, 16), (257, 8), (512, 8), (4096, 1), (9000, 1)]
)
def test_long_sequences_come_in_smaller_batches_with_as_many_in_an_update(length: int, size: int) -> None:
    sized = TrainingSettings().for_length(length)
    assert (sized.batch_size, sized.accumulate) == (size, 32 // size)


@pytest.mark.parametrize(("length", "size"), [(64, 2), (128, 2), (129, 1), (512, 1)])
def test_samples_of_several_sequences_are_fewer(length: int, size: int) -> None:
    sized = TrainingSettings().for_length(length, 16)
    assert (sized.batch_size, sized.accumulate) == (size, 2 // size)


def test_batches_that_are_added_up_have_32_sequences_each() -> None:
    sized = TrainingSettings(accumulate=3).for_length(128, 16)
    assert (sized.batch_size, sized.accumulate) == (2, 3)


@pytest.mark.parametrize("chosen", [{"batch_size": 7}, {"accumulate": 2}, {"batch_size": 32, "accumulate": 1}])
def test_a_chosen_size_is_kept(chosen: dict[str, int], tmp_path: Path) -> None:
    settings = TrainingSettings(**chosen, cpu=True).for_length(512)
    arguments = settings.arguments(tmp_path)
    expected = {"batch_size": 32, "accumulate": 1} | chosen
    assert arguments.per_device_train_batch_size == expected["batch_size"]
    assert arguments.gradient_accumulation_steps == expected["accumulate"]
