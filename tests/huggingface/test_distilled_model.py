"""A student that learns what a teacher predicts for the masked tokens."""

from __future__ import annotations

import math

import pytest
import torch

from mlsm_plugin.huggingface import MaskedLmCollator, Masking, PretrainingSequences
from mlsm_plugin.huggingface.distilled_model import DistilledModel
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert


def batch_of(number: int = 6) -> dict[str, torch.Tensor]:
    dataset = PretrainingSequences(random_ids(number))
    return MaskedLmCollator(make_tokenizer(), Masking(mask_prob=0.4))([dataset[index] for index in range(number)])


def test_loss_is_the_mean_divergence_from_the_stock_teacher_on_masked_tokens() -> None:
    batch = batch_of()
    student, teacher = tiny_bert(1, initializer_range=0.3), tiny_bert(2, initializer_range=0.3)
    masked = batch["labels"] >= 0
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = [model.eval()(**inputs).logits[masked].double() / 3 for model in (student, teacher)]
    q, p = (one.softmax(1) for one in logits)
    expected = 9 * (p * (p / q).log()).sum(1)
    model = DistilledModel.of(student, teacher=teacher, temperature=3.0).eval()
    found = model(**batch)
    assert float(found["loss"]) == pytest.approx(float(expected.mean()), rel=1e-4)
    assert float(expected.mean()) > 0.05
    figures = model.means_of(found["parts"].sum(0))
    mlm = torch.nn.functional.cross_entropy(logits[0] * 3, batch["labels"][masked])
    assert figures["teacher_kl"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert figures["mlm_loss"] == pytest.approx(float(mlm), rel=1e-4)
    assert figures["masked_share"] == pytest.approx(float(masked.sum() / batch["content"].sum()))


def test_the_student_becomes_the_teacher_which_is_no_part_of_it() -> None:
    batch, teacher = batch_of(), tiny_bert(2, initializer_range=0.3)
    before = {name: values.clone() for name, values in teacher.state_dict().items()}
    names = tiny_bert(1).state_dict().keys()
    model = DistilledModel.of(tiny_bert(1), teacher=teacher, temperature=2.0)
    assert model.state_dict().keys() == names
    assert model(**batch)["loss"].item() > 0.05
    assert DistilledModel.of(tiny_bert(2, initializer_range=0.3), teacher=teacher)(**batch)["loss"].item() < 1e-6
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(model(**batch)["loss"])
        losses[-1].backward()
        optimizer.step()
    assert losses[-1].item() < 0.5 * losses[0].item()
    assert all(torch.equal(before[name], values) for name, values in teacher.state_dict().items())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the student has 65 tokens, the teacher 70; they must be the same"):
        DistilledModel.of(tiny_bert(), teacher=tiny_bert(vocab_size=70))
    for temperature in (0.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be positive"):
            DistilledModel.of(tiny_bert(), teacher=tiny_bert(), temperature=temperature)
