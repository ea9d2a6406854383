"""Tensors of all ranks of a data-parallel group."""

from __future__ import annotations

import torch
from fairseq.distributed import utils as distributed
from torch import Tensor


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """The rows of all ranks, without gradient. Every rank has to call it, also one without rows.

    Args:
        rows: ``(n, ...)``; n may differ from rank to rank, the rest may not.

    Returns:
        ``(sum of all n, ...)`` in the order of the ranks, and where those of this rank begin.
    """
    group = distributed.get_data_parallel_group()
    if distributed.get_world_size(group) == 1:
        return rows.detach(), 0
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [int(n) for n in torch.cat(distributed.all_gather(count, group)).tolist()]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = distributed.all_gather(padded, group)
    gathered = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
    return gathered, sum(counts[: distributed.get_rank(group)])


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of ``values``, of one shape on all ranks, over them."""
    group = distributed.get_data_parallel_group()
    if distributed.get_world_size(group) > 1:
        values = values.clone()
        distributed.all_reduce(values, group)
    return values
