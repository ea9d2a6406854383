"""TACO in the library's Trainer; test_same_losses compares it with fairseq's criterion."""

from __future__ import annotations

import pytest
import torch

from mlsm_plugin.huggingface import PretrainingSequences, TokenContrastiveCollator
from mlsm_plugin.huggingface.collators import IGNORED
from mlsm_plugin.huggingface.pretraining_model import TokenContrastiveModel
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert


def test_the_loss_is_the_sum_of_its_parts_and_evaluation_gives_them() -> None:
    dataset = PretrainingSequences(random_ids(8))
    batch = TokenContrastiveCollator(make_tokenizer())([dataset[index] for index in range(8)])
    model = TokenContrastiveModel.of(tiny_bert(), contrastive_weight=0.5).eval()
    output = model(**batch)
    parts = model.means_of(output["parts"].sum(dim=0))
    assert len(output["parts"]) == 8
    model.train()(**batch)
    assert model.taken_parts() == pytest.approx(parts, rel=1e-5)  # the sums of the whole batch
    masked = (batch["labels"] != IGNORED).sum(dim=1)
    assert output["parts"][:, 1].tolist() == masked.tolist()
    model.eval()
    assert float(output["loss"]) == pytest.approx(parts["mlm_loss"] + 0.5 * parts["contrastive_loss"], rel=1e-5)
    assert 0 <= parts["contrastive_accuracy"] <= 1
    only_mlm = TokenContrastiveModel.of(model, contrastive_weight=0.0)
    assert float(only_mlm(**batch)["loss"]) == pytest.approx(parts["mlm_loss"], rel=1e-5)


@pytest.mark.parametrize("kind", ["nothing masked", "one sequence", "all padding"])
def test_every_batch_gives_a_finite_loss_and_gradient(kind: str) -> None:
    dataset = PretrainingSequences(random_ids(3))
    rows = range(1) if kind == "one sequence" else range(3)
    batch = TokenContrastiveCollator(make_tokenizer())([dataset[index] for index in rows])
    if kind != "one sequence":
        batch["labels"].fill_(IGNORED)
    if kind == "all padding":
        batch["attention_mask"].fill_(0)
        batch["pairs"]["anchors"].fill_(False)
    model = TokenContrastiveModel.of(tiny_bert()).train()
    loss = model(**batch)["loss"]
    loss.backward()
    assert bool(loss.isfinite())
    assert all(bool(values.grad.isfinite().all()) for values in model.parameters() if values.grad is not None)
    assert torch.is_tensor(loss)


def test_options_out_of_range_are_one_line() -> None:
    with pytest.raises(ValueError, match="contrastive_weight must not be negative"):
        TokenContrastiveModel.of(tiny_bert(), contrastive_weight=-1)
    with pytest.raises(ValueError, match="temperature must be positive"):
        TokenContrastiveModel.of(tiny_bert(), temperature=0)
