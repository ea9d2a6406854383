"""The parts of the loss in the Trainer's logs, and the epoch of its sequences."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from transformers import (
    DebertaConfig,
    DebertaForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from mlsm_plugin.core.masking.span_groups import SpanRules
from mlsm_plugin.core.text.hf_tokenizer import vocabulary_fingerprint
from mlsm_plugin.huggingface import (
    MaskedLmCollator,
    MaskedLmModel,
    Masking,
    PretrainingSequences,
    SpanContrastiveModel,
    SpanGroups,
    SpanGroupsCollator,
    TokenContrastiveCollator,
    TokenContrastiveModel,
    TokenSequences,
    trainer_callback,
)
from mlsm_plugin.huggingface.trainer_callback import PretrainingCallback, ProgressBars, prepare
from tests.huggingface.tiny_corpus import CLS, SEP, UNK, make_tokenizer, random_ids, tiny_bert


class Reporter(TrainerCallback):
    """Stands where TensorBoard's callback stands: among the first."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))


def make_trainer(folder: Path, model: Any, *, max_steps: int = 2, smoothing: float = 0.0, **options: Any) -> Trainer:
    quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(
        str(folder), max_steps=max_steps, logging_steps=1, label_smoothing_factor=smoothing, **quiet
    )
    data = PretrainingSequences(random_ids(16))
    collator = MaskedLmCollator(make_tokenizer())
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator, **options)


def test_every_reporter_sees_the_parts(tmp_path: Path) -> None:
    reporter = Reporter()
    trainer = make_trainer(tmp_path, MaskedLmModel.of(tiny_bert()), callbacks=[reporter])
    prepare(trainer)
    trainer.train()
    assert [log["mlm_loss"] for log in reporter.seen[:2]] == pytest.approx([log["loss"] for log in reporter.seen[:2]])
    found = trainer.evaluate()
    assert found["eval_mlm_loss"] == pytest.approx(found["eval_loss"], rel=0.1)  # the Trainer's is a mean of batches


def test_the_callback_alone_writes_to_the_history(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, MaskedLmModel.of(tiny_bert()), callbacks=[PretrainingCallback()])
    trainer.train()
    assert all(log["mlm_loss"] == pytest.approx(log["loss"]) for log in trainer.state.log_history[:2])


def parts_of(kind: str) -> tuple[Any, Any, Any]:
    """A model, a dataset of ids for it, and a collator that masks a third."""
    masking, tokenizer = Masking(mask_prob=0.3), make_tokenizer()
    if kind == "npm":
        rules = SpanRules(mask_prob=0.3)
        collator: Any = SpanGroupsCollator(tokenizer, max_length=300, rules=rules)
        return SpanContrastiveModel.of(tiny_bert(max_position_embeddings=300)), SpanGroups, collator
    if kind == "taco":
        return TokenContrastiveModel.of(tiny_bert()), PretrainingSequences, TokenContrastiveCollator(tokenizer, masking)
    return MaskedLmModel.of(tiny_bert()), PretrainingSequences, MaskedLmCollator(tokenizer, masking)


@pytest.mark.parametrize("kind", ["mlm", "taco", "npm"])
def test_the_share_that_is_masked_is_logged_and_judged(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)

    def trainer_of(unknown: float) -> tuple[Trainer, Any]:
        model, dataset, collator = parts_of(kind)
        texts = [rng.integers(5, 25, size=100) for _ in range(20)]
        texts = [np.array([CLS, *np.where(rng.random(100) < unknown, UNK, one), SEP]) for one in texts]
        trainer = make_trainer(tmp_path, model, max_steps=1)
        trainer.train_dataset = trainer.eval_dataset = dataset(texts)
        trainer.data_collator = collator
        return trainer, collator

    trainer, collator = trainer_of(0.0)
    prepare(trainer).train()
    batches = [collator([trainer.train_dataset[index]]) for index in range(len(trainer.train_dataset))]
    masked, content = np.array([collator.masked_counts(batch) for batch in batches]).sum(axis=0)
    assert content == 20 * 100
    assert masked / content == pytest.approx(0.3, abs=0.05)
    assert trainer.evaluate()["eval_masked_share"] == pytest.approx(masked / content)
    assert trainer.state.log_history[0]["masked_share"] == pytest.approx(0.3, abs=0.1)
    assert not caplog.records
    prepare(trainer_of(0.3)[0])
    for name, message in zip(("train_dataset", "eval_dataset"), caplog.messages, strict=True):
        assert re.match(rf"(29|3\d)\.\d\d% of the tokens of the sequences of {name} are unknown, more than 1", message)
    caplog.clear()
    prepare(trainer_of(0.7)[0])
    assert sum(message.startswith("only 0.0") for message in caplog.messages) == 2  # of both datasets
    with pytest.raises(
        ValueError, match=r"^only 0\.0\d+ of the tokens of train_dataset are masked, and 0\.3 were asked"
    ):
        prepare(trainer_of(0.95)[0])


def test_the_bars_show_updates_and_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    trainer = prepare(make_trainer(tmp_path, MaskedLmModel.of(tiny_bert()), max_steps=4))
    bars = ProgressBars(tokens_of_update=100)
    trainer.add_callback(bars)
    trainer.train()
    trainer.evaluate()
    shown = capsys.readouterr().err
    assert re.search(r"training, loss \d+\.\d+, [\d,]+ tokens/s: 100%\|.*4/4 ", shown)
    assert "evaluating: " in shown
    trainer.pop_callback(bars)
    trainer.add_callback(ProgressBars())
    trainer.train()
    assert re.search(r"training, loss \d+\.\d+: 100%\|.*4/4 ", capsys.readouterr().err)


def test_a_training_does_not_log_figures_of_an_earlier_one(tmp_path: Path) -> None:
    model = MaskedLmModel.of(tiny_bert()).train()
    model(input_ids=torch.tensor([[2, 9, 4, 3]]), labels=torch.tensor([[-100, -100, 8, -100]]))
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer_callback.PretrainingCallback().on_train_begin(arguments, TrainerState(), TrainerControl(), model=model)
    assert model.taken_parts() == {}


def test_the_minutes_of_a_training_are_told_once_some_updates_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a clock that gives 6 seconds to each update, 10 of 40 measured after the first."""
    monkeypatch.setattr(trainer_callback.time, "monotonic", itertools.count(0.0, 6.0).__next__)
    bars = ProgressBars(tokens_of_update=600)
    state = TrainerState(max_steps=40, is_world_process_zero=True)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    bars.on_train_begin(arguments, state, TrainerControl())
    for update in range(1, 41):
        state.global_step = update
        bars.on_step_end(arguments, state, TrainerControl())
    assert capsys.readouterr().out == "about 3 minutes for the other 29 updates\n"
    assert bars._speed == ", 100 tokens/s"
    bars.on_train_end(arguments, state, TrainerControl())


def test_a_stock_model_has_no_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BertForMaskedLM has no objective of this package"):
        prepare(make_trainer(tmp_path, tiny_bert()))


def test_several_gpus_of_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, MaskedLmModel.of(tiny_bert()))
    monkeypatch.setattr(TrainingArguments, "n_gpu", 3)
    with pytest.raises(ValueError, match="this process sees 3 GPUs; start one for each with torchrun"):
        prepare(trainer)


@pytest.mark.parametrize("averages", [True, False])
def test_ranks_whose_tokens_count_differently_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, averages: bool
) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, average_tokens_across_devices=averages)
    arguments.average_tokens_across_devices = averages  # with one process, it is switched off
    collator = MaskedLmCollator(make_tokenizer())
    dataset = PretrainingSequences(random_ids(8))
    trainer = Trainer(MaskedLmModel.of(tiny_bert()), arguments, data_collator=collator, train_dataset=dataset)
    prepare(trainer)
    assert not caplog.messages
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    prepare(trainer)
    assert ("average_tokens_across_devices is off" in caplog.text) is not averages


def test_half_precision_of_a_model_that_overflows_is_refused(tmp_path: Path) -> None:
    config = DebertaConfig(vocab_size=65, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = MaskedLmModel.of(DebertaForMaskedLM(config))
    arguments = TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, report_to=[])
    with pytest.raises(
        ValueError, match="of type deberta overflows in half precision; train it with bf16 and fp16 False"
    ):
        prepare(Trainer(model, arguments))


def test_label_smoothing_is_refused(tmp_path: Path) -> None:
    # the Trainer takes the labels out of the batch, without which the forward pass is the stock one
    with pytest.raises(ValueError, match="label_smoothing_factor replaces the objective by masked LM"):
        prepare(make_trainer(tmp_path, MaskedLmModel.of(tiny_bert()), smoothing=0.1))


@pytest.mark.parametrize("wrapped", [lambda data: data, lambda data: ConcatDataset([Subset(data, range(16))])])
def test_each_epoch_has_its_own_masks(tmp_path: Path, wrapped: Any) -> None:
    trainer, epochs = make_trainer(tmp_path, MaskedLmModel.of(tiny_bert()), max_steps=5), []
    trainer.train_dataset = wrapped(trainer.train_dataset)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: epochs.extend(one.epoch for one in rows) or collate(rows)
    prepare(trainer).train()
    assert epochs[:32] == [0] * 16 + [1] * 16
    assert set(epochs[32:]) == {2}


@pytest.mark.parametrize("wrapped", [lambda data: data, lambda data: ConcatDataset([Subset(data, range(16))])])
def test_sequences_of_another_tokenizer_are_refused(tmp_path: Path, wrapped: Any) -> None:
    other = make_tokenizer(without=(7,))
    about = {"tokenizer": vocabulary_fingerprint(make_tokenizer())}
    trainer = make_trainer(tmp_path, MaskedLmModel.of(tiny_bert()))
    written = TokenSequences.write(tmp_path / "tokens", random_ids(16), about=about)
    trainer.train_dataset = wrapped(PretrainingSequences(written))
    prepare(trainer)
    trainer.data_collator = MaskedLmCollator(other)
    with pytest.raises(ValueError, match="the sequences of train_dataset were made with a tokenizer of another vocab"):
        prepare(trainer)
    trainer.data_collator = SpanGroupsCollator(other, max_length=30)
    trainer.train_dataset = wrapped(SpanGroups(written))
    with pytest.raises(ValueError, match="the sequences of train_dataset were made with a tokenizer of another vocab"):
        prepare(trainer)
