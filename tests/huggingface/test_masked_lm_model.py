"""MLM with the head on masked tokens only."""

from __future__ import annotations

import pytest
import torch

from mlsm_plugin.huggingface import MaskedLmCollator, MaskedLmModel, PretrainingSequences
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert


def test_loss_and_gradients_are_those_of_the_stock_class() -> None:
    dataset = PretrainingSequences(random_ids(8))
    batch = MaskedLmCollator(make_tokenizer())([dataset[index] for index in range(8)])
    stock, model = tiny_bert(), MaskedLmModel.of(tiny_bert())
    wanted, found = stock(**batch).loss, model(**batch)["loss"]
    torch.testing.assert_close(found, wanted)
    wanted.backward()
    found.backward()
    for (name, one), (_, other) in zip(stock.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7, msg=name)
    update = {"num_items_in_batch": (batch["labels"] >= 0).sum()}
    halves = [model(**_rows(batch, rows), **update)["loss"] for rows in (slice(3), slice(3, None))]
    torch.testing.assert_close(halves[0] + halves[1], wanted)


def test_an_evaluation_has_the_sums_of_each_sequence() -> None:
    dataset = PretrainingSequences(random_ids(8))
    batch = MaskedLmCollator(make_tokenizer())([dataset[index] for index in range(8)])
    model = MaskedLmModel.of(tiny_bert()).eval()
    parts = model(**batch)["parts"]
    alone = torch.cat([model(**_rows(batch, slice(row, row + 1)))["parts"] for row in range(8)])
    torch.testing.assert_close(parts, alone)
    assert len(set(parts[:, 0].tolist())) > 4
    assert float(parts[:, 0].sum() / parts[:, 1].sum()) == pytest.approx(float(model(**batch)["loss"]), rel=1e-5)


def _rows(batch: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    return {name: part[rows] for name, part in batch.items()}
