"""The parts of the loss in the Trainer's logs, and the epoch of its sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments

from mlsm_plugin.huggingface import MaskedLmCollator, MaskedLmModel, PretrainingSequences, TokenSequences
from mlsm_plugin.huggingface.span_groups import SpanGroups, SpanGroupsCollator
from mlsm_plugin.huggingface.trainer_callback import PretrainingCallback, prepare
from mlsm_plugin.tokenization.hf_tokenizer import vocabulary_fingerprint
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert


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


def test_a_stock_model_has_no_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BertForMaskedLM has no objective of this package"):
        prepare(make_trainer(tmp_path, tiny_bert()))


def test_several_gpus_of_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, MaskedLmModel.of(tiny_bert()))
    monkeypatch.setattr(TrainingArguments, "n_gpu", 3)
    with pytest.raises(ValueError, match="this process sees 3 GPUs; start one for each with torchrun"):
        prepare(trainer)


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
