"""Two real processes exchange tensors, and compute the contrastive loss from them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mlsm_plugin.core.losses.span_contrastive import span_contrastive_terms
from mlsm_plugin.core.losses.token_contrastive import contrastive_terms
from mlsm_plugin.fairseq_plugin.compat.rank_gather import gather_rows, sum_over_ranks
from tests.conftest import REPOSITORY

RANK = """
import sys
import torch
from mlsm_plugin.core.losses.token_contrastive import contrastive_terms, sample_pairs, unit_rows
from mlsm_plugin.fairseq_plugin.compat.rank_gather import gather_rows, sum_over_ranks

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
semantics, valid = torch.load(f"{folder}/batch{rank}.pt")
semantics.requires_grad_()
keys, first = gather_rows(unit_rows(semantics[valid]))
positive, negative = sample_pairs(
    valid, window=3, num_negatives=5, pool_size=len(keys), first=first, generator=torch.Generator().manual_seed(rank)
)
terms = contrastive_terms(semantics, valid, positive, negative, temperature=0.1, keys=keys)
terms.loss.backward()
total = sum_over_ranks(torch.tensor([1.0, rank]))
results = {"loss": terms.loss.detach(), "gradient": semantics.grad, "positive": positive, "negative": negative}
torch.save({**results, "first": first, "keys": keys, "total": total}, f"{folder}/result{rank}.pt")
torch.distributed.destroy_process_group()
"""


RANK_OF_SPANS = """
import sys
import torch
from mlsm_plugin.core.losses.span_contrastive import span_contrastive_terms
from mlsm_plugin.fairseq_plugin.compat.rank_gather import gather_rows, gather_rows_with_gradient

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
queries, keys, phrases, ids = torch.load(f"{folder}/batch{rank}.pt")
queries.requires_grad_()
keys.requires_grad_()
all_keys, _ = gather_rows_with_gradient(keys)
all_ids, _ = gather_rows(ids)
positives = phrases[:, None] == all_ids
loss = span_contrastive_terms(queries, all_keys, positives, torch.ones_like(positives)).loss
loss.backward()
torch.save({"loss": loss.detach(), "queries": queries.grad, "keys": keys.grad}, f"{folder}/result{rank}.pt")
torch.distributed.destroy_process_group()
"""


def run_ranks(
    folder: Path, batches: Sequence[tuple[torch.Tensor, ...]], program: str = RANK
) -> list[dict[str, torch.Tensor]]:
    for rank, batch in enumerate(batches):
        torch.save(batch, folder / f"batch{rank}.pt")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), str(folder)], env=environment) for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"result{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [((2, 5), (3, 7)), ((1, 4), (1, 6)), ((0, 1), (3, 4))])
@pytest.mark.usefixtures("warm_python")
def test_negatives_of_all_ranks_give_the_loss_and_gradient_of_one_rank_with_all_sequences(
    tmp_path: Path, shapes: tuple[tuple[int, int], ...]
) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(*shape, 8, generator=generator), torch.rand(shape, generator=generator) < 0.8) for shape in shapes
    ]
    results = run_ranks(tmp_path, batches)
    for result in results:
        assert result["total"].tolist() == [2, 1]
        assert torch.equal(result["keys"], results[0]["keys"])
    assert [int(result["first"]) for result in results] == [0, int(batches[0][1].sum())]

    # one batch with all sequences: the pool's tokens are its valid ones
    length = max(shape[1] for shape in shapes)
    pad = [(0, 0, 0, length - shape[1]) for shape in shapes]
    semantics = torch.cat([torch.nn.functional.pad(batch[0], p) for batch, p in zip(batches, pad, strict=True)])
    valid = torch.cat([torch.nn.functional.pad(batch[1], p[2:]) for batch, p in zip(batches, pad, strict=True)])
    place = valid.flatten().nonzero().squeeze(1)

    def in_the_batch(name: str) -> torch.Tensor:
        parts = []
        for result, p in zip(results, pad, strict=True):
            padding = p[2:] if name == "positive" else p
            parts.append(torch.nn.functional.pad(result[name], padding, value=-1))
        drawn = torch.cat(parts)
        return torch.where(drawn < 0, -1, place[drawn])

    positive, negative = in_the_batch("positive"), in_the_batch("negative")
    sequence = torch.arange(len(valid))[:, None].expand_as(valid)
    has = (negative >= 0).all(dim=2)
    assert torch.equal(has, valid)
    assert bool((sequence.flatten()[negative] != sequence[:, :, None])[has].all())
    semantics.requires_grad_()
    loss = contrastive_terms(semantics, valid, positive, negative, temperature=0.1).loss
    loss.backward()
    assert float(sum(result["loss"] for result in results)) == pytest.approx(float(loss.detach()), rel=1e-5)
    rows = semantics.grad.split([shape[0] for shape in shapes])
    for result, row, shape in zip(results, rows, shapes, strict=True):
        torch.testing.assert_close(result["gradient"], row[:, : shape[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((4, 6), (3, 9)), ((5, 7), (0, 0)), ((0, 3), (2, 1))])
@pytest.mark.usefixtures("warm_python")
def test_gradients_of_all_ranks_reach_the_keys(tmp_path: Path, sizes: tuple[tuple[int, int], ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    batches = [
        (
            *(torch.randn(size, 8, generator=generator, dtype=torch.double) for size in (n, m)),
            *(torch.randint(3, (size,), generator=generator) for size in (n, m)),
        )
        for n, m in sizes
    ]
    results = run_ranks(tmp_path, batches, RANK_OF_SPANS)
    queries, keys, phrases, ids = (torch.cat(parts) for parts in zip(*batches, strict=True))
    queries.requires_grad_()
    keys.requires_grad_()
    positives = phrases[:, None] == ids
    loss = span_contrastive_terms(queries, keys, positives, torch.ones_like(positives)).loss
    loss.backward()
    assert float(loss) > 0
    torch.testing.assert_close(sum(result["loss"] for result in results), loss.detach())
    for name, gradient in (("queries", queries.grad), ("keys", keys.grad)):
        torch.testing.assert_close(torch.cat([result[name] for result in results]), gradient)


def test_one_process_keeps_its_rows_without_gradient() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    gathered, first = gather_rows(rows)
    assert torch.equal(gathered, rows)
    assert not gathered.requires_grad
    assert first == 0
    assert torch.equal(sum_over_ranks(torch.tensor([3.0])), torch.tensor([3.0]))
