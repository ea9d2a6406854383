"""Groups of sequences for NPM in the library's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from mlsm_plugin.huggingface import SpanContrastiveModel, SpanGroups, collators
from mlsm_plugin.huggingface.collators import IGNORED, SpanGroupsCollator
from mlsm_plugin.huggingface.trainer_callback import prepare
from tests.huggingface.tiny_corpus import CLS, MASK, PAD, SEP, make_tokenizer, random_ids, tiny_bert


def repeated_ids() -> list[np.ndarray]:
    """Sequences that have words in common."""
    rng = np.random.default_rng(2)
    return [np.array([CLS, *rng.integers(5, 15, size=12), SEP]) for _ in range(20)]


def test_a_batch_has_the_spans_with_their_masks() -> None:
    groups = SpanGroups(repeated_ids(), group_size=5)
    assert len(groups) == 4
    collator = SpanGroupsCollator(make_tokenizer(), max_length=40)
    batch = collator([groups[0], groups[1]])
    spans = batch["spans"]
    alone = [collator([groups[index]])["spans"]["length"] for index in (0, 1)]
    assert (batch["labels"] == 1).sum(dim=1).tolist() == [len(lengths) for lengths in alone]
    assert set(batch["labels"].unique().tolist()) <= {1, IGNORED}
    assert int((batch["labels"] == 1).sum()) == len(spans["length"]) > 0
    for sequence, start, end in zip(spans["sequence"], spans["query_start"], spans["query_end"], strict=True):
        assert batch["input_ids"][sequence, start] == batch["input_ids"][sequence, end] == MASK
        assert end == start + 1
    assert batch["content"].tolist() == [60, 60]
    assert int(batch["special"][0]) == PAD
    assert sorted(batch["special"].tolist()) == [PAD, CLS, SEP, MASK]
    assert torch.equal(collator([groups[0], groups[1]])["input_ids"], batch["input_ids"])
    groups.set_epoch(1)
    assert not torch.equal(collator([groups[0], groups[1]])["input_ids"], batch["input_ids"])


def test_a_group_of_empty_sequences_has_a_loss_of_0() -> None:
    groups = SpanGroups([[], [], [CLS, 7, SEP], []], group_size=2)
    batch = SpanGroupsCollator(make_tokenizer(), max_length=40)([groups[0]])
    assert batch["input_ids"].tolist() == batch["context_ids"].tolist() == [[PAD], [PAD]]
    loss = SpanContrastiveModel.of(tiny_bert()).train()(**batch)["loss"]
    loss.backward()
    assert loss.item() == 0


def test_npm_trains_and_evaluates(tmp_path: Path) -> None:
    groups = SpanGroups(repeated_ids(), group_size=5)
    trainer = Trainer(
        SpanContrastiveModel.of(tiny_bert()),
        TrainingArguments(
            *(str(tmp_path),), max_steps=30, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=2,
        ),
        train_dataset=groups, eval_dataset=groups, data_collator=SpanGroupsCollator(make_tokenizer(), max_length=40),
    )  # fmt: skip
    prepare(trainer)
    before = trainer.evaluate()
    trainer.train()
    first, after = trainer.state.log_history[1], trainer.evaluate()
    assert first["loss"] == pytest.approx(first["start_loss"] + first["end_loss"], rel=1e-4)
    assert after["eval_start_loss"] < before["eval_start_loss"]
    assert 0 <= after["eval_accuracy"] <= 1


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5])
def test_an_evaluation_counts_all_spans_of_the_last_batch(tmp_path: Path, batch_size: int) -> None:
    ids = [one if index < 10 else one[::3] for index, one in enumerate(repeated_ids() * 2)]
    groups, collator = SpanGroups(ids[:25], group_size=5), SpanGroupsCollator(make_tokenizer(), max_length=40)
    model = SpanContrastiveModel.of(tiny_bert())
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=batch_size, report_to=[], use_cpu=True, disable_tqdm=True
    )
    found = prepare(Trainer(model, arguments, eval_dataset=groups, data_collator=collator)).evaluate()
    model.train()  # it then has the sums of whole batches
    with torch.no_grad():
        for batch in DataLoader(groups, batch_size=batch_size, collate_fn=collator):
            model(**batch)
    for name, value in model.taken_parts().items():
        assert found[f"eval_{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("ids", [[[CLS, 9, SEP], [CLS, 11, SEP]], [[CLS, SEP], [CLS, SEP]]])
def test_a_batch_without_spans_gives_a_loss_of_0(ids: Any) -> None:
    model = SpanContrastiveModel.of(tiny_bert()).train()
    batch = SpanGroupsCollator(make_tokenizer(), max_length=40)([SpanGroups(ids, 2)[0]])
    loss = model(**batch)["loss"]
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.requires_grad)


def test_a_long_word_is_masked_by_its_pieces() -> None:
    """Text without spaces is one word for each line; its spans were never found."""
    rng = np.random.default_rng(4)
    lines = [np.array([CLS, *rng.integers(40, 50, size=60), SEP]) for _ in range(20)]  # pieces that go on with a word
    collator = SpanGroupsCollator(make_tokenizer(), max_length=200)
    masked, content = collator.masked_counts(collator([SpanGroups(lines, 20)[0]]))
    assert content == 20 * 60
    assert masked / content == pytest.approx(0.15, abs=0.01)


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"got a dict, not a SpanGroup: wrap the ids in SpanGroups\(ids\)"):
        SpanGroupsCollator(make_tokenizer(), max_length=40)([{"input_ids": [CLS, 9, SEP]}])
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        SpanGroups(random_ids(4), 1)
    with pytest.raises(ValueError, match="the text is only one sequence"):
        SpanGroups(random_ids(1))
    with pytest.raises(ValueError, match="the tokenizer has no mask token"):
        SpanGroupsCollator(make_tokenizer(mask_token=None), max_length=40)


def test_sequences_longer_than_the_positions_are_refused() -> None:
    (group,) = SpanGroups(repeated_ids(), group_size=100)
    longest = max(map(len, group.sequences))
    SpanGroupsCollator(make_tokenizer(), max_length=longest)([group])
    with pytest.raises(ValueError, match=rf"a sequence of group 0 has {longest} tokens, but the model takes at most 4"):
        SpanGroupsCollator(make_tokenizer(), max_length=4)([group])
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        SpanGroupsCollator(make_tokenizer(), max_length=0)


def test_a_batch_without_spans_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(collators, "FEWEST_TOKENS", 4)
    collator = SpanGroupsCollator(make_tokenizer(), max_length=32)
    groups = list(SpanGroups([[CLS, 9, 10, SEP], [CLS, 11, 12, SEP]]))
    for _ in range(2):
        collator(groups)
    (message,) = caplog.messages
    assert message.startswith("nothing is masked in a batch of 1 groups: spans must occur in two sequences of a group")
