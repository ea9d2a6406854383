"""Which latents are active, and products with only these: the inner loop of training and coding with SAEs.

A row of latents has ``k`` non-zeros of thousands. On a CPU, products with the ``k`` chosen rows of a matrix (torch's
CSR kernels) take about a tenth of the time of the dense products. On other devices the products are dense.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

# A longer row is cut into groups of sqrt(n / k) values. The k largest values lie in the k groups with the largest
# maxima, so that two short searches find them.
FEWEST_GROUPED = 256


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, as ``values.topk(k, dim=1, sorted=False)`` gives them up to ties and order.

    ``torch.topk`` looks at all values; on a CPU this is about three times as fast for 3,000 values and k = 42.

    Args:
        values: (n, m).
        k: how many, at most m.

    Returns:
        values (n, k) and columns (n, k) int64.
    """
    rows, width = values.shape
    size = int((width / k) ** 0.5)
    if values.device.type != "cpu" or size < 2 or width < FEWEST_GROUPED or rows == 0:
        return values.topk(k, dim=1, sorted=False)
    groups = width // size  # column c of the first groups * size ones lies in the group c % groups
    grouped, rest = values[:, : groups * size].unflatten(1, (size, groups)), values[:, groups * size :]
    best = grouped.amax(1).topk(k, dim=1, sorted=False).indices  # (n, k)
    columns = (best[:, None, :] + torch.arange(0, groups * size, groups)[:, None]).flatten(1)  # (n, size * k)
    if rest.shape[1]:
        last = torch.arange(groups * size, width).expand(rows, -1)
        columns = torch.cat([columns, last], dim=1)
    found, places = values.gather(1, columns).topk(k, dim=1, sorted=False)
    return found, columns.gather(1, places)


def largest_of_all(values: Tensor, count: int, bar: float) -> Tensor:
    """Flat places (count,) int64, ascending, of the largest values of a matrix.

    Args:
        values: (n, m).
        count: how many.
        bar: a guess; if at least ``count`` values are above it, only those are searched.
    """
    flat = values.flatten()
    above = torch.nonzero(flat > bar).squeeze(1)
    if len(above) >= count:
        above = above[flat[above].topk(count, sorted=False).indices]
    else:
        above = flat.topk(count, sorted=False).indices
    return above.sort().values


class ChosenLatents:
    """Places in a matrix (n, n_atoms) of latents, and products with the values there.

    Args:
        rows: (m,) int64, ascending.
        columns: (m,) int64.
        shape: (n, n_atoms).
    """

    def __init__(self, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> None:
        self.rows, self.columns, self.shape = rows, columns, shape
        self.dense = rows.device.type != "cpu"
        self._by_column: Tensor | None = None

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """(m,), the inner products of the rows of ``left`` (n, dim) and ``right`` (n_atoms, dim) at these places."""
        if self.dense:
            return (left @ right.T)[self.rows, self.columns]
        places = _csr(self.rows, self.columns, left.new_zeros(len(self.rows)), self.shape)
        return torch.sparse.sampled_addmm(places, left, right.T).values()

    def times(self, values: Tensor, matrix: Tensor) -> Tensor:
        """(n, dim), the product of the matrix of ``values`` (m,) and ``matrix`` (n_atoms, dim)."""
        if self.dense:
            return self._filled(values) @ matrix
        return _csr(self.rows, self.columns, values, self.shape) @ matrix

    def transposed_times(self, values: Tensor, matrix: Tensor) -> Tensor:
        """(n_atoms, dim), the product of the transposed matrix of ``values`` (m,) and ``matrix`` (n, dim)."""
        if self.dense:
            return self._filled(values).T @ matrix
        if self._by_column is None:
            self._by_column = torch.argsort(self.columns, stable=True)
        order = self._by_column
        return _csr(self.columns[order], self.rows[order], values[order], self.shape[::-1]) @ matrix

    def sums(self, values: Tensor) -> Tensor:
        """(n_atoms,), the sums of the columns of the matrix of ``values`` (m,)."""
        if self.dense:
            return self._filled(values).sum(0)
        return values.new_zeros(self.shape[1]).index_add_(0, self.columns, values)

    def _filled(self, values: Tensor) -> Tensor:
        filled = values.new_zeros(self.shape)
        filled[self.rows, self.columns] = values
        return filled


def _csr(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse matrix; ``rows`` are ascending."""
    _hear_that_csr_is_new()
    ends = torch.bincount(rows, minlength=shape[0]).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


@functools.cache
def _hear_that_csr_is_new() -> None:
    """Let torch warn of it, which it does once.

    Leaving ``catch_warnings`` makes Python show all other warnings again, so it must not be entered in every update.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        none = torch.zeros(0, dtype=torch.int64)
        torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int64), none, none.float(), (0, 0))
