"""What the models with an objective have in common."""

from __future__ import annotations

import pytest
import torch

from mlsm_plugin.huggingface import LatentSemanticModel, MaskedLmModel, TokenContrastiveModel
from mlsm_plugin.huggingface.pretraining_model import PretrainingModel, sums_of_rows
from tests.huggingface.tiny_corpus import tiny_bert


def test_means_are_sums_divided_by_their_counts() -> None:
    found = LatentSemanticModel.means_of([2.0, 4.0, 9.0, 3.0, 4.0, 16.0])
    assert found == {"kl": 0.5, "mlm_loss": 3.0, "masked_share": 0.25}
    assert LatentSemanticModel.means_of([0.0, 0.0, 9.0, 3.0, 3.0, 0.0]) == {"mlm_loss": 3.0}


def test_sums_of_rows() -> None:
    chosen = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    assert sums_of_rows(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), chosen).tolist() == [3.0, 0.0, 28.0]
    assert sums_of_rows(torch.zeros(0), torch.zeros(2, 3, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_another_objective_takes_the_place_of_the_first() -> None:
    model = TokenContrastiveModel.of(MaskedLmModel.of(tiny_bert()))
    assert isinstance(model, TokenContrastiveModel)
    assert not isinstance(model, MaskedLmModel)
    assert type(model).__name__ == "BertForMaskedLM"
    assert isinstance(model, PretrainingModel)


def test_without_labels_the_forward_pass_is_the_stock_one() -> None:
    ids, stock = torch.tensor([[2, 9, 4, 3]]), tiny_bert().eval()
    wanted = stock(input_ids=ids).logits
    for objective, options in (
        (MaskedLmModel, {}),
        (TokenContrastiveModel, {}),
        (LatentSemanticModel, {"num_atoms": 3}),
    ):
        assert torch.equal(objective.of(stock, **options)(input_ids=ids).logits, wanted)


def test_parts_are_collected_until_they_are_taken() -> None:
    model = MaskedLmModel.of(tiny_bert()).train()
    batch = {"input_ids": torch.tensor([[2, 9, 4, 3]]), "labels": torch.tensor([[-100, -100, 8, -100]])}
    first, second = (float(model(**batch)["loss"].detach()) for _ in range(2))
    assert model.taken_parts() == {"mlm_loss": pytest.approx((first + second) / 2)}
    assert model.taken_parts() == {}
    model(**batch, content=torch.tensor([2]))
    assert model.taken_parts() == {"mlm_loss": pytest.approx(first), "masked_share": 0.5}
    assert "parts" in model.eval()(**batch)
    assert model.taken_parts() == {}


def test_parts_of_an_earlier_objective_are_forgotten() -> None:
    model = TokenContrastiveModel.of(tiny_bert()).train()
    batch = {"input_ids": torch.tensor([[2, 9, 4, 3]]), "labels": torch.tensor([[-100, -100, 8, -100]])}
    same = MaskedLmModel.of(model)
    model(**batch)
    assert MaskedLmModel.of(same).taken_parts() == {}
