"""Span denoising with a stock T5 in the library's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

from mlsm_plugin.core.masking.span_corruption import SpanNoise
from mlsm_plugin.huggingface.collators import IGNORED, SpanDenoisingCollator
from tests.restored_spans import restore_spans

PAD, EOS, SENTINELS = 0, 1, range(119, 99, -1)  # T5's sentinels go down from the largest id
TEXTS = [[*range(10, 10 + length)] for length in (5, 30, 18, 24)]


def make_collator() -> SpanDenoisingCollator:
    return SpanDenoisingCollator(SENTINELS, eos=EOS, pad=PAD, noise=SpanNoise(0.3, 2.0))


def independent_loss(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """The mean of -log p over all tokens of the targets, one sequence at a time and without padding."""
    total, count = 0.0, 0
    for ids, attended, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        source, target = ids[attended.bool()], labels[labels != IGNORED]
        decoder = torch.cat([torch.tensor([model.config.decoder_start_token_id]), target[:-1]])
        with torch.no_grad():
            logits = model(input_ids=source[None], decoder_input_ids=decoder[None]).logits[0].double()
        total -= float(logits.log_softmax(dim=1)[torch.arange(len(target)), target].sum())
        count += len(target)
    return total / count


def test_a_batch_holds_the_texts() -> None:
    batch = make_collator()(TEXTS)
    assert {values.dtype for values in batch.values()} == {torch.int64}
    lengths = batch["attention_mask"].sum(dim=1)
    assert len(set(lengths.tolist())) > 1
    for row, text in enumerate(TEXTS):
        source, target = batch["input_ids"][row, : lengths[row]], batch["labels"][row]
        assert bool((batch["input_ids"][row, lengths[row] :] == PAD).all())
        target = target[: int((target != IGNORED).sum())]
        assert IGNORED not in target
        assert restore_spans(source, target, sentinels=SENTINELS, eos=EOS).tolist() == text


def test_eos_padding_and_unknown_tokens_are_no_targets() -> None:
    """The input of the issue: EOS was the only target, in three of three draws."""
    for seed in range(3):
        torch.manual_seed(seed)
        batch = SpanDenoisingCollator(range(900, 1000), eos=1, pad=0)([[11, 12, 13, 14, 15, 16, 17, 18, 1]])
        assert batch["labels"].tolist() == [[900, 18, 1]]
        assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 15, 16, 17, 900, 1]]
    encoded = BatchEncoding({"input_ids": [11, 2, 12, 2, 13, 2, 1, 0, 0], "attention_mask": [1] * 7 + [0] * 2})
    collator = SpanDenoisingCollator(range(900, 1000), eos=1, pad=0, unk=2, noise=SpanNoise(0.5, 2.0))
    for seed in range(10):
        torch.manual_seed(seed)
        batch = collator([encoded, {"input_ids": torch.tensor([2, 2, 2, 1])}])
        assert 2 not in batch["labels"]
        assert set(batch["labels"][0].tolist()) & {11, 12, 13}
        assert batch["labels"][1].tolist()[:2] == [900, 1]  # nothing is missing
        assert (batch["input_ids"] == 2).sum(dim=1).tolist() == [3, 3]


def test_a_stock_t5_trains_on_the_loss_of_its_targets(tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=120, decoder_start_token_id=PAD, **sizes))
    collator, batches, expected = make_collator(), [], []

    def collate(texts: Any) -> dict[str, torch.Tensor]:
        batches.append(collator(texts))
        if len(batches) == 1:
            expected.append(independent_loss(model.eval(), batches[0]))
            model.train()
        return batches[-1]

    arguments = TrainingArguments(
        str(tmp_path), max_steps=30, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=TEXTS, data_collator=collate)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[0] == pytest.approx(expected[0], abs=2e-4)
    assert losses[-1] < losses[0] - 0.5
    assert bool((batches[0]["labels"] == IGNORED).any())


def test_a_text_of_unknown_tokens_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    collator = SpanDenoisingCollator(range(900, 1000), eos=1, pad=0, unk=2)
    collator([[11, 2, 12, 2, 13, 1]])
    assert caplog.messages == []
    for _ in range(2):
        collator([[11, 12, 13, 1], [2, 2, 2, 1]])
    said = (
        "a text of 3 tokens has only unknown or special ones: nothing is learned from it; use a model with a tokenizer"
    )
    assert caplog.messages == [f"{said} for such text"]
