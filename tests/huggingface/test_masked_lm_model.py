"""MLM with the head on masked tokens only."""

from __future__ import annotations

import torch

from mlsm_plugin.huggingface import MaskedLmCollator, MaskedLmModel, PretrainingSequences
from tests.huggingface.tiny_corpus import make_tokenizer, random_ids, tiny_bert


def test_loss_and_gradients_are_those_of_the_stock_class() -> None:
    dataset = PretrainingSequences(random_ids(8))
    batch = MaskedLmCollator(make_tokenizer())([dataset[index] for index in range(8)])
    stock, model = tiny_bert(), MaskedLmModel.of(tiny_bert())
    wanted, found = stock(**batch).loss, model(**batch)["loss"]
    torch.testing.assert_close(found, wanted)
    wanted.backward(), found.backward()
    for (name, one), (_, other) in zip(stock.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7, msg=name)
    update = {"num_items_in_batch": (batch["labels"] >= 0).sum()}
    halves = [model(**_rows(batch, rows), **update)["loss"] for rows in (slice(3), slice(3, None))]
    torch.testing.assert_close(halves[0] + halves[1], wanted)


def _rows(batch: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    return {name: part[rows] for name, part in batch.items()}
