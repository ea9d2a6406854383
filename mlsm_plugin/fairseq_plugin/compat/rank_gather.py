"""Gather and reduce tensors across the ranks of a data-parallel group."""

import functools
from typing import Any

import torch
from fairseq.distributed import utils as distributed
from torch import Tensor
from torch.distributed import ProcessGroup


@functools.cache
def _consecutive_ranks(size: int) -> ProcessGroup:
    return torch.distributed.new_subgroups(size)[0]  # every rank has to call this


def rank_group(size: int | None = None) -> ProcessGroup:
    """This rank's process group of ``size`` consecutive ranks; None: all data-parallel ranks.

    ValueError if the number of ranks is not a multiple of ``size``.
    """
    everyone = distributed.get_data_parallel_group()
    world = distributed.get_world_size(everyone)
    if size is None or size >= world:
        return everyone
    if size < 1 or world % size:
        raise ValueError(f"{world} ranks cannot be divided into groups of {size}; choose a divisor of {world}")
    return _consecutive_ranks(size)


def gather_rows(rows: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, int]:
    """Gather the rows of all ranks, without gradient. Every rank has to call this, even without rows.

    ``rows`` are ``(n, ...)``, and n may differ from rank to rank. Returns ``(sum of all n, ...)`` in the order of the
    ranks, and the index of this rank's first row.
    """
    group = rank_group() if group is None else group
    if distributed.get_world_size(group) == 1:
        return rows.detach(), 0
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [int(n) for n in torch.cat(distributed.all_gather(count, group)).tolist()]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = distributed.all_gather(padded, group)
    gathered = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
    return gathered, sum(counts[: distributed.get_rank(group)])


def gather_rows_with_gradient(rows: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, int]:
    """As :func:`gather_rows`, with gradient: all ranks' gradients for the rows of this rank are summed."""
    group = rank_group() if group is None else group
    if distributed.get_world_size(group) == 1:
        return rows, 0
    gathered, first = _GatherRows.apply(rows, group)
    return gathered, first


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> tuple[Tensor, int]:
        gathered, first = gather_rows(rows, group)
        ctx.group = group
        ctx.rows_of_this_rank = slice(first, first + len(rows))
        return gathered, first

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: object) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient, ctx.group)
        return gradient[ctx.rows_of_this_rank], None


def sum_over_ranks(values: Tensor) -> Tensor:
    """The elementwise sum of ``values`` over all ranks; their shape must be the same on all ranks."""
    return _reduced(values, "sum", rank_group())


def largest_over_ranks(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The elementwise maximum of ``values`` over the ranks; their shape must be the same on all ranks."""
    return _reduced(values, "max", rank_group() if group is None else group)


def _reduced(values: Tensor, operation: str, group: ProcessGroup) -> Tensor:
    if distributed.get_world_size(group) > 1:
        values = values.clone()
        distributed.all_reduce(values, group, op=operation)
    return values
