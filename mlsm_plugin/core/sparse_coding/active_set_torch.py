"""The active-set solver without a compiler: all rows of a batch in parallel, in float64, on any device.

The method is the same as in the compiled loop (:mod:`mlsm_plugin.core.sparse_coding.active_set`), in another order. The
supports of a batch are padded to one length, so that one batched call factors and solves their Gram blocks.
"""

import functools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

BLOCK = 16  # maximum number of atoms that join each support in a round
DIMENSIONS_PER_FIRST_ATOM = 8  # size of the first support: dim divided by this
MAX_ROUNDS = 200
MAX_SOLUTIONS = 40  # maximum solutions within a round; a row that needs more continues in the next round
BUSY = 5 / 6  # all rows are solved once more if more than this share is unfinished; a smaller share would compute more
SLACK = 1e-9  # slack of the optimality conditions, relative to lambda
NEGLIGIBLE = 1e-12  # a weight counts as zero if it is at most this share of its last downward step
# Added to the diagonal of the Gram blocks, relative to their largest entry. If atoms of a support are linearly
# dependent, the step is then long in directions in which only the penalty changes, until a weight is zero.
DAMPING = 1e-11
# Entries (float64) of the largest temporaries: 32 MB each on the CPU, and 512 MB on other devices, where larger batches
# are faster. About five of them exist at a time.
ENTRIES = {"cpu": 2**22}
ENTRIES_ELSEWHERE = 2**26
# A Gram matrix with at most this many entries is kept in memory (16,384 atoms: 1 GiB in float32). Rows of a larger
# matrix are computed when they are needed.
GRAM_ENTRIES = 2**28


Rows = TypeVar("Rows", np.ndarray, Tensor)


class ArrayContents:
    """An array as the key of a cache; keys are equal if their values are equal."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.copy()

    def __hash__(self) -> int:
        return hash((self.array.shape, float(self.array[0].sum())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayContents) and np.array_equal(self.array, other.array)


def ridge_ranking(atoms: Tensor) -> Tensor:
    """Rows (n_atoms, dim) float64 whose inner products with ``x`` rank the atoms for the code of ``x``.

    The residual of the ridge regression of ``x`` on the atoms is proportional to ``(D^T D + r I)^-1 x``, with ``r`` the
    mean eigenvalue of ``D^T D``. Atoms are ranked by their inner products with it.
    """
    covariance = atoms.T @ atoms
    ridge = covariance.trace() / len(covariance)
    if ridge <= 0:
        return atoms
    identity = torch.eye(len(covariance), dtype=atoms.dtype, device=atoms.device)
    return torch.linalg.solve(covariance + ridge * identity, atoms.T).T * ridge


@dataclass
class Supports:
    """The codes of ``n`` rows, padded to a common length ``k``."""

    atoms: Tensor  # (n, k) int64; padding may repeat any atom
    weights: Tensor  # (n, k) float64, 0 for padding and for atoms that have just joined
    held: Tensor  # (n, k) bool, False for padding

    def select(self, rows: Tensor) -> "Supports":
        return Supports(self.atoms[rows], self.weights[rows], self.held[rows])

    def narrowed(self) -> "Supports":
        """The same codes without columns that no row uses."""
        order = torch.argsort(self.held, dim=1, descending=True, stable=True)
        order = order[:, : int(self.held.sum(dim=1).max()) if len(order) else 0]
        return Supports(self.atoms.gather(1, order), self.weights.gather(1, order), self.held.gather(1, order))

    def dense(self, num_atoms: int) -> Tensor:
        """The codes as a dense matrix, (n, num_atoms) float64."""
        codes = self.weights.new_zeros(len(self.weights), num_atoms)
        return codes.scatter_add_(1, self.atoms, torch.where(self.held, self.weights, 0.0))


@dataclass(frozen=True)
class Problem:
    """A dictionary on its device, and the penalty."""

    atoms: Tensor  # (n_atoms, dim) float64
    gram: Tensor | None  # (n_atoms, n_atoms) float64, or None if it would be too large
    ridge: Tensor  # (n_atoms, dim), see ridge_ranking
    lambda_: float

    def gram_blocks(self, atoms: Tensor) -> Tensor:
        """(n, k, k) inner products among the atoms of each row of ``atoms`` (n, k)."""
        if self.gram is not None:
            return self.gram[atoms[:, :, None], atoms[:, None, :]]
        vectors = self.atoms[atoms]  # (n, k, dim)
        return vectors @ vectors.mT


def solve_batched(hidden: Tensor, atoms: np.ndarray, lambda_: float) -> tuple[sp.csr_matrix, np.ndarray]:
    """As :func:`mlsm_plugin.core.sparse_coding.active_set.solve_with_active_set`, on the device of the rows."""
    problem = _prepared(ArrayContents(atoms), hidden.device, lambda_)
    rows = max(1, ENTRIES.get(hidden.device.type, ENTRIES_ELSEWHERE) // len(atoms))
    codes = []
    gaps = []
    for start in range(0, len(hidden), rows):
        batch_codes, batch_gaps = _solve_batch(hidden[start : start + rows], problem)
        codes.append(batch_codes)
        gaps.append(batch_gaps)
    return sp.vstack(codes, format="csr"), np.concatenate(gaps)


@functools.lru_cache(maxsize=1)
def _prepared(contents: ArrayContents, device: torch.device, lambda_: float) -> Problem:
    """The dictionary on its device, cached as long as the atoms stay the same."""
    atoms = torch.tensor(contents.array, device=device)
    gram = atoms @ atoms.T if len(atoms) ** 2 <= GRAM_ENTRIES else None
    return Problem(atoms, gram, ridge_ranking(atoms), lambda_)


def _solve_batch(x: Tensor, problem: Problem) -> tuple[sp.csr_matrix, np.ndarray]:
    """Grow, solve and check the supports in rounds; finished rows leave the batch."""
    num_rows = len(x)
    num_atoms = len(problem.atoms)
    lambda_ = problem.lambda_
    gaps = x.new_ones(num_rows)
    finished: list[tuple[Tensor, Supports]] = []
    rows = torch.arange(num_rows, device=x.device)
    first = min(num_atoms, max(BLOCK, x.shape[1] // DIMENSIONS_PER_FIRST_ATOM))
    nothing = x.new_zeros(num_rows, 0)
    supports = Supports(nothing.long(), nothing, nothing.bool())
    supports = _joined(supports, x @ problem.ridge.T, 0.0, torch.full_like(rows, first))
    limits = torch.full_like(rows, BLOCK)
    previous = x.new_full((num_rows,), torch.inf)
    for _ in range(MAX_ROUNDS):
        supports = _minimized(supports, x @ problem.atoms.T, problem)
        dense = supports.dense(num_atoms)
        residual = x - dense @ problem.atoms
        correlations = residual @ problem.atoms.T
        penalty = lambda_ * dense.sum(dim=1)
        objective = 0.5 * (residual * residual).sum(dim=1) + penalty
        largest = correlations.amax(dim=1)
        gaps[rows] = relative_gap_of_parts(x, residual, largest, penalty, lambda_)
        optimal = largest <= lambda_ * (1 + SLACK)
        # a row without progress tries one atom at a time; if that does not help, it is given up
        stuck = objective >= previous * (1 - 1e-15)
        given_up = stuck & (limits == 1)
        limits = torch.where(stuck, torch.ones_like(limits), torch.full_like(limits, BLOCK))
        leaving = optimal | given_up
        leave = leaving.nonzero().squeeze(1)
        stay = (~leaving).nonzero().squeeze(1)
        finished.append((rows[leave], supports.select(leave)))
        rows = rows[stay]
        x = x[stay]
        limits = limits[stay]
        previous = objective[stay]
        if len(rows) == 0:
            break
        supports = _joined(supports.select(stay).narrowed(), correlations[stay], lambda_ * (1 + SLACK), limits)
    if len(rows):
        finished.append((rows, supports))
    return _csr(finished, num_rows, num_atoms), gaps.cpu().numpy()


def relative_gap_of_parts(x: Rows, residual: Rows, largest: Rows, penalty: Rows, lambda_: float) -> Rows:
    """An upper bound on how far each code is from optimal, relative to its objective, for numpy or torch.

    With ``r = x - a D`` and ``P(a) = 0.5 * ||r||^2 + lambda_ * sum(a)``, the point
    ``theta = r * min(1, lambda_ / max_j (D r)_j)`` satisfies ``D theta <= lambda_`` and is thus feasible for
    the dual ``Q(theta) = 0.5 * ||x||^2 - 0.5 * ||x - theta||^2``. No primal value is below Q(theta) (Fenchel duality;
    Mairal, 2010, appendix D). The gap is ``(P(a) - Q(theta)) / P(a) >= (P(a) - min P) / P(a)``: (rows,) float64 in
    [0, 1], and 0 for a row of zeros with an empty code.

    Args:
        x, residual: (rows, dim) float64, ``x`` and ``r``.
        largest: (rows,), the largest entry of ``D r``.
        penalty: (rows,), ``lambda_ * sum(a)``.
    """
    scale = lambda_ / largest.clip(min=lambda_)
    squared_residual = (residual * residual).sum(-1)
    primal = 0.5 * squared_residual + penalty
    dual = scale * (x * residual).sum(-1) - 0.5 * scale**2 * squared_residual
    return ((primal - dual) / primal.clip(min=np.finfo(np.float64).tiny)).clip(min=0, max=1)


def _joined(supports: Supports, values: Tensor, threshold: float, limits: Tensor) -> Supports:
    """Add the atoms with the largest ``values`` (n, n_atoms) above ``threshold``, at most ``limits`` (n,) per row."""
    # the minimum, since padding may repeat an atom of the support
    taken = torch.where(supports.held, -torch.inf, torch.inf).to(values.dtype)
    values = values.scatter_reduce(1, supports.atoms, taken, "amin")
    top, atoms = values.topk(min(int(limits.max()), values.shape[1]), dim=1)
    joins = (top > threshold) & (torch.arange(top.shape[1], device=top.device) < limits[:, None])
    return Supports(
        torch.cat([supports.atoms, atoms], dim=1),
        torch.cat([supports.weights, torch.zeros_like(top)], dim=1),
        torch.cat([supports.held, joins], dim=1),
    )


def _minimized(supports: Supports, correlations: Tensor, problem: Problem) -> Supports:
    """Find the minimizers over the supports, and remove atoms whose weights would turn negative.

    Finished rows stay in the batch for a few more solutions, which do not change them. Each solution waits once for the
    GPU, to count the unfinished rows. ``correlations`` (n, n_atoms) are inner products of hidden states and atoms.
    """
    weights = supports.weights.clone()
    held = supports.held.clone()
    active = torch.arange(len(weights), device=weights.device)
    part = supports
    products = correlations.gather(1, supports.atoms)
    for _ in range(MAX_SOLUTIONS):
        step = _newton_step(part, products, problem)
        blocking = part.held & (part.weights + step <= 0)
        ratio = torch.where(blocking, part.weights / (-step).clip(min=torch.finfo(step.dtype).tiny), torch.inf)
        fraction = ratio.amin(dim=1, keepdim=True).clip(max=1.0) if ratio.shape[1] else step.new_ones(len(step), 1)
        moved = part.weights + fraction * step  # stays 0 for padding
        gone = part.held & (step < 0) & (moved <= -NEGLIGIBLE * step)
        part = Supports(part.atoms, torch.where(gone, 0.0, moved), part.held ^ gone)
        unfinished = gone.any(dim=1)
        count = int(unfinished.sum())
        if count <= BUSY * len(active):
            weights[active] = part.weights
            held[active] = part.held
            if count == 0:
                break
            chosen = unfinished.nonzero().squeeze(1)
            active = active[chosen]
            part = part.select(chosen)
            products = products[chosen]
    else:
        weights[active] = part.weights
        held[active] = part.held
    return Supports(supports.atoms, weights, held)


def _newton_step(part: Supports, correlations: Tensor, problem: Problem) -> Tensor:
    """Steps (n, k) from the weights to the minimizers over the supports, 0 for padding; in parts that fit memory."""
    width = max(1, part.atoms.shape[1])
    depth = width if problem.gram is not None else max(width, problem.atoms.shape[1])
    rows = max(1, ENTRIES.get(correlations.device.type, ENTRIES_ELSEWHERE) // (width * depth))
    if len(part.atoms) > rows:
        pieces = zip(*(each.split(rows) for each in (part.atoms, part.weights, part.held, correlations)), strict=True)
        return torch.cat([_newton_step(Supports(*piece[:3]), piece[3], problem) for piece in pieces])
    blocks = problem.gram_blocks(part.atoms)  # (n, k, k)
    blocks = torch.where(part.held[:, :, None] & part.held[:, None, :], blocks, 0.0)
    gradient = correlations - (blocks @ part.weights[:, :, None]).squeeze(2) - problem.lambda_
    if blocks.shape[1] == 0:
        return gradient
    largest = blocks.diagonal(dim1=1, dim2=2).amax(dim=1, keepdim=True).clip(min=torch.finfo(blocks.dtype).tiny)
    blocks.diagonal(dim1=1, dim2=2).add_(torch.where(part.held, DAMPING * largest, largest))
    factor, _ = torch.linalg.cholesky_ex(blocks)
    step = torch.cholesky_solve(gradient[:, :, None], factor).squeeze(2)
    return torch.where(part.held, step.nan_to_num(0.0, 0.0, 0.0), 0.0)  # a row whose factor does not exist stays


def _csr(finished: list[tuple[Tensor, Supports]], num_rows: int, num_atoms: int) -> sp.csr_matrix:
    """The codes (num_rows, num_atoms) of the finished rows, in their original order."""
    columns = []
    for of_part, part in finished:
        row, column = part.held.nonzero(as_tuple=True)
        columns.append((of_part[row], part.atoms[row, column], part.weights[row, column]))
    rows = torch.cat([part_rows for part_rows, _, _ in columns]).cpu().numpy()
    atoms = torch.cat([part_atoms for _, part_atoms, _ in columns]).cpu().numpy()
    weights = torch.cat([part_weights for _, _, part_weights in columns]).cpu().numpy()
    return sp.csr_matrix((weights, (rows, atoms)), shape=(num_rows, num_atoms))
