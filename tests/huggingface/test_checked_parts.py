"""Model, tokenizer, text and batches that do not belong together are refused before the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset
from transformers import Trainer, TrainingArguments

from mlsm_plugin.huggingface import (
    MaskedLmCollator,
    MaskedLmModel,
    PretrainingSequences,
    SentenceCollator,
    SentenceVectorModel,
    SentenceVectors,
    SpanContrastiveModel,
    SpanGroups,
    SpanGroupsCollator,
    TokenContrastiveCollator,
    TokenContrastiveModel,
    prepare,
)
from mlsm_plugin.huggingface.checked_parts import with_inner
from tests.huggingface.tiny_corpus import CLS, SEP, make_tokenizer, random_ids, tiny_bert

LINE_OF_PAIRS = r"^only {} of the anchors of train_dataset have a positive and negatives; an anchor needs another known"


def trainer_of(folder: Path, model: Any, data: Any, collator: Any, batch_size: int = 8) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=batch_size, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=data, data_collator=collator)


COLLATORS: dict[str, Any] = {
    "mlm": MaskedLmCollator,
    "taco": TokenContrastiveCollator,
    "npm": lambda tokenizer: SpanGroupsCollator(tokenizer, max_length=30),
    "sentences": SentenceCollator,
}


@pytest.mark.parametrize("kind", COLLATORS)
def test_padding_is_a_token_of_its_own(kind: str) -> None:
    COLLATORS[kind](make_tokenizer())
    for pad in ("[SEP]", "[CLS]", "[MASK]"):
        with pytest.raises(ValueError, match=r"the pad token and the \w+ token are both the id \d; set pad_token to a"):
            COLLATORS[kind](make_tokenizer(pad_token=pad))
    with pytest.raises(ValueError, match="the tokenizer has no pad token"):
        COLLATORS[kind](make_tokenizer(pad_token=None))


@pytest.mark.parametrize("mask", ["[SEP]", "[UNK]"])
def test_the_mask_is_a_token_of_its_own(mask: str) -> None:
    with pytest.raises(ValueError, match=r"the mask token and the \w+ token are both the id \d; set mask_token to a"):
        MaskedLmCollator(make_tokenizer(mask_token=mask))


@pytest.mark.parametrize(
    ("model", "data", "kind"),
    [
        (MaskedLmModel.of(tiny_bert(vocab_size=60)), PretrainingSequences(random_ids(8)), "mlm"),
        (SpanContrastiveModel.of(tiny_bert(vocab_size=60)), SpanGroups(random_ids(8)), "npm"),
        (
            SentenceVectorModel.of(tiny_bert(vocab_size=60), width=32),
            SentenceVectors(random_ids(8), np.zeros((8, 4), np.float32)),
            "sentences",
        ),
    ],
)
def test_ids_without_embeddings_are_refused(tmp_path: Path, model: Any, data: Any, kind: str) -> None:
    line = "BertForMaskedLM: the tokenizer's ids need 65 embeddings, the model has 60; use its own tokenizer, or resize"
    with pytest.raises(ValueError, match=line):
        prepare(trainer_of(tmp_path, model, data, COLLATORS[kind](make_tokenizer())))


def test_sequences_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    long = np.array([CLS, *[7] * 20, SEP])
    ids = [*random_ids(6, longest=10), long, *random_ids(6, longest=10)]
    model, collator = MaskedLmModel.of(tiny_bert(max_position_embeddings=21)), MaskedLmCollator(make_tokenizer())
    for data in (PretrainingSequences(ids), Subset(PretrainingSequences(ids), range(13))):
        with pytest.raises(ValueError, match=r"sequence 6 has 22 tokens, but the model takes at most 21; cut the seq"):
            prepare(trainer_of(tmp_path, model, data, collator))
    prepare(trainer_of(tmp_path, MaskedLmModel.of(tiny_bert(max_position_embeddings=22)), data, collator))


def test_masks_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    model, data = SpanContrastiveModel.of(tiny_bert(max_position_embeddings=30)), SpanGroups(random_ids(20))
    with pytest.raises(ValueError, match="max_length of the collator is 31, and the model takes at most 30; pass that"):
        prepare(trainer_of(tmp_path, model, data, SpanGroupsCollator(make_tokenizer(), max_length=31)))


def sequences(lengths: list[int]) -> PretrainingSequences:
    rng = np.random.default_rng(0)
    return PretrainingSequences([np.array([CLS, *rng.integers(5, 65, size=length), SEP]) for length in lengths])


@pytest.mark.parametrize(
    ("lengths", "batch_size", "share"),
    [([1] * 40, 8, "0"), ([10] * 40, 1, "0"), ([1] * 94 + [2] * 2, 8, r"0\.041"), ([10], 8, "0")],
)
def test_taco_without_pairs_is_refused(tmp_path: Path, lengths: list[int], batch_size: int, share: str) -> None:
    collator = TokenContrastiveCollator(make_tokenizer())
    model = TokenContrastiveModel.of(tiny_bert())
    with pytest.raises(ValueError, match=LINE_OF_PAIRS.format(share)):
        prepare(trainer_of(tmp_path, model, sequences(lengths), collator, batch_size))
    # masked LM alone was asked for
    model = TokenContrastiveModel.of(tiny_bert(), contrastive_weight=0.0)
    prepare(trainer_of(tmp_path, model, sequences(lengths), collator, batch_size))


def test_taco_with_few_pairs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    collator = TokenContrastiveCollator(make_tokenizer())
    for lengths, said in (([10] * 30, 0), ([1] * 30 + [3] * 5, 1)):
        prepare(trainer_of(tmp_path, TokenContrastiveModel.of(tiny_bert()), sequences(lengths), collator))
        assert len(caplog.messages) == said
    assert caplog.messages[0].startswith("only 0.33 of the anchors of train_dataset have a positive and negatives; ")


def test_what_is_within_a_dataset_is_found() -> None:
    data = sequences([3, 4])
    wrapped = ConcatDataset([Subset(data, range(1)), data])
    assert [*with_inner(wrapped)].count(data) == 2
