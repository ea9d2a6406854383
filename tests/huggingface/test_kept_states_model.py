"""Masked LM that keeps the hidden states of the model before the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from mlsm_plugin.huggingface import (
    KeptStatesModel,
    MaskedLmCollator,
    MaskedLmModel,
    Masking,
    PretrainingSequences,
    save_pretrained,
)
from mlsm_plugin.huggingface.kept_states_model import SHARE
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert


def batch_of(number: int, mask_prob: float = 0.4) -> dict[str, Any]:
    dataset = PretrainingSequences(random_ids(number))
    return MaskedLmCollator(make_tokenizer(), Masking(mask_prob=mask_prob))([dataset[row] for row in range(number)])


def changed(model: KeptStatesModel) -> KeptStatesModel:
    """The model with other weights."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.mark.parametrize("number", [1, 2, 6])
def test_the_loss_is_that_of_masks_and_the_change_of_other_tokens(number: int) -> None:
    batch = batch_of(number)
    model = changed(KeptStatesModel.of(tiny_bert(1, initializer_range=0.2), keep_weight=0.5)).double().eval()
    before = tiny_bert(1, initializer_range=0.2).double().eval()
    model._before[0].double()
    labels = batch["labels"]
    original = torch.where(labels >= 0, labels, batch["input_ids"])
    changes: list[float] = []
    for row in range((number + SHARE - 1) // SHARE):
        length = int(batch["attention_mask"][row].sum())
        now = model.bert(batch["input_ids"][row, :length][None])[0][0].detach()
        then = before.bert(original[row, :length][None])[0][0].detach()
        changes += [
            float((now[place] - then[place]).norm() ** 2 / then[place].norm() ** 2)
            for place in range(length)
            if labels[row, place] < 0
        ]
    output = model(**batch)
    figures = model.means_of(output["parts"].sum(0))
    mlm = MaskedLmModel.of(tiny_bert(1)).double()
    mlm.load_state_dict(model.state_dict())
    expected = float(mlm.eval()(**batch)["loss"])
    change = sum(changes) / len(changes)
    assert change > 0.001
    assert figures["mlm_loss"] == pytest.approx(expected, rel=1e-6)
    assert figures["state_change"] == pytest.approx(change, rel=1e-5)
    assert output["loss"].item() == pytest.approx(expected + 0.5 * change, rel=1e-5)
    assert figures["masked_share"] == pytest.approx(float((labels >= 0).sum() / batch["content"].sum()))


def test_without_a_change_it_is_masked_lm() -> None:
    batch = batch_of(5, mask_prob=1e-9)
    output = KeptStatesModel.of(tiny_bert(1)).eval()(**batch)
    assert output["loss"].item() == 0
    assert float(KeptStatesModel.of(tiny_bert(1)).means_of(output["parts"].sum(0))["state_change"]) == 0


@pytest.mark.parametrize(("number", "mask_prob"), [(1, 1e-9), (1, 1.0), (5, 1.0), (3, 1e-9)])
def test_every_batch_has_a_finite_loss_and_gradient(number: int, mask_prob: float) -> None:
    batch = batch_of(number, mask_prob)
    for row in range(number):
        batch["input_ids"][row, :] = batch["input_ids"][row, 0]  # the same token everywhere
    model = changed(KeptStatesModel.of(tiny_bert(1))).train()
    loss = model(**batch)["loss"]
    loss.backward()
    assert bool(loss.isfinite())
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters() if weight.grad is not None)


def test_hidden_states_change_less_than_with_masked_lm_alone() -> None:
    batch = batch_of(12, mask_prob=0.2)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    vectors = {}
    losses = {}
    models = {"mlm": MaskedLmModel.of(tiny_bert(1)), "kept": KeptStatesModel.of(tiny_bert(1), keep_weight=30.0)}
    before = models["mlm"].eval().bert(**inputs)[0].detach()
    for name, model in models.items():
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-3)
        for _ in range(25):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
        vectors[name] = float((model.eval().bert(**inputs)[0] - before).square().mean())
        losses[name] = float(MaskedLmModel.of(model)(**batch)["loss"])
    assert vectors["kept"] < 0.5 * vectors["mlm"]
    assert losses["kept"] < float(MaskedLmModel.of(tiny_bert(1)).eval()(**batch)["loss"])


def test_only_the_stock_model_is_saved(tmp_path: Path) -> None:
    model = changed(KeptStatesModel.of(tiny_bert(1)))
    save_pretrained(tmp_path / "model", model, make_tokenizer())
    saved = AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    assert saved.state_dict().keys() == tiny_bert(1).state_dict().keys()
    torch.testing.assert_close(saved.bert.embeddings.word_embeddings.weight, model.get_input_embeddings().weight)


def test_the_record_is_that_of_the_weights_before() -> None:
    model = KeptStatesModel.of(tiny_bert(1))
    record = model.targets_record()
    assert changed(model).targets_record() == record
    assert KeptStatesModel.of(tiny_bert(1)).targets_record() == record
    assert KeptStatesModel.of(tiny_bert(2)).targets_record() != record
    assert KeptStatesModel.of(tiny_bert(1), keep_weight=4.0).targets_record() != record


def test_another_objective_drops_the_model_before() -> None:
    model = KeptStatesModel.of(tiny_bert(1))
    assert hasattr(model, "_before")
    assert not hasattr(MaskedLmModel.of(model), "_before")


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="keep_weight must be positive and finite"):
        KeptStatesModel.of(tiny_bert(1), keep_weight=weight)
