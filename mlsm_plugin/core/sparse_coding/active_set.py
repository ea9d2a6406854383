"""The active-set solver: exact codes for a batch of rows at a time.

The code of a row is computed on a *working set* of a few hundred atoms, and then verified or improved with all atoms:

1. All atoms are ranked by their inner products with the residual of a ridge regression of the row on all atoms, which
   take one matrix product. Nearly all atoms of the final code are among the first few hundred of this ranking. Plain
   correlations with the row rank worse, because hidden states and atoms share a large common component.
2. The non-negative lasso is solved on the working set by an active-set method: solve for the weights of the support
   with a Cholesky factor of its Gram block, remove the atoms whose weights would turn negative, add the atoms that
   violate the optimality conditions most, repeat (Lawson and Hanson, 1974, ch. 23, extended to the lasso and to
   several atoms at once).
3. The optimality conditions are checked for all atoms with one matrix product. If they hold, the duality gap certifies
   the code. Otherwise the violating atoms join the working set, and step 2 is repeated for the row.

On the CPU, step 2 is compiled (:mod:`~mlsm_plugin.core.sparse_coding.active_set_kernel`, numba) and works row by row in
cache. Matrix products and the Gram matrix are float32. Everything that decides the result is float64: the factor, the
residual, the conditions near their boundary, the gap. On other devices and without numba, the rows of a batch are
solved in parallel in float64 (:mod:`~mlsm_plugin.core.sparse_coding.active_set_torch`). So are the rare rows whose
atoms are too close to linear dependence for a float32 Gram matrix.
"""

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.sparse_coding.active_set_torch import GRAM_ENTRIES, ArrayContents, ridge_ranking, solve_batched
from mlsm_plugin.core.sparse_coding.sparse_coder import DENSE_ENTRIES

logger = logging.getLogger(__name__)

MAX_ROUNDS = 20  # maximum rounds of solving and checking; real hidden states need 2 to 5
# From the second round on, atoms whose inner product with the residual is above this share of lambda join, too. Some of
# them would violate the conditions after the violators have joined.
NEAR_VIOLATION = 0.8
ROWS_PER_TASK = 64  # rows per task of a thread


@dataclass(frozen=True)
class PreparedDictionary:
    """A dictionary, and values computed from it once for all rows."""

    atoms: np.ndarray  # (n_atoms, dim) float64
    atoms32: torch.Tensor  # (n_atoms, dim) float32
    gram: np.ndarray  # (n_atoms, n_atoms) float32, or (0, 0) if it would be too large
    ridge: torch.Tensor  # (n_atoms, dim) float32; a row times its transpose ranks the atoms for the first working set
    rounding: float  # bound on the error of a float32 inner product of an atom with a vector of norm 1


@dataclass
class Batch:
    """Rows that are solved together: ``n`` rows with codes of at most ``depth`` atoms."""

    hidden: np.ndarray  # (n, dim) float64
    atoms: np.ndarray  # (n, depth) int32, atoms of each code
    weights: np.ndarray  # (n, depth) float64
    sizes: np.ndarray  # (n,) int64, number of atoms in each code; -1 before the first round
    residuals: np.ndarray  # (n, dim) float64
    gaps: np.ndarray  # (n,) float64

    @classmethod
    def of(cls, hidden: np.ndarray, num_atoms: int) -> "Batch":
        depth = min(num_atoms, hidden.shape[1])  # more atoms cannot be linearly independent
        return cls(
            np.require(hidden, requirements="W"),  # numba would compile again for a read-only array
            np.zeros((len(hidden), depth), np.int32),
            np.zeros((len(hidden), depth)),
            np.full(len(hidden), -1, np.int64),
            np.zeros_like(hidden),
            np.ones(len(hidden)),
        )

    def codes(self, num_atoms: int) -> sp.csr_matrix:
        """The codes of the batch, (n, n_atoms) float64."""
        held = np.arange(self.atoms.shape[1]) < self.sizes[:, None]
        indptr = np.concatenate([[0], np.cumsum(self.sizes)])
        return sp.csr_matrix((self.weights[held], self.atoms[held], indptr), shape=(len(self.sizes), num_atoms))


def solve_with_active_set(
    hidden: torch.Tensor, atoms: np.ndarray, lambda_: float, threads: int | None = None
) -> tuple[sp.csr_matrix, np.ndarray]:
    """Exact codes (n_tokens, n_atoms) and their certified relative duality gaps (n_tokens,), float64.

    ``hidden`` (n_tokens, dim) and ``atoms`` (n_atoms, dim) are float64; ``hidden`` is coded on its device.
    ``threads`` bounds the threads of the compiled loop; matrix products use torch's threads.
    """
    if hidden.device.type != "cpu" or not compiler_is_there():
        return solve_batched(hidden, atoms, lambda_)
    prepared = _prepared(ArrayContents(atoms))
    rows = max(1, DENSE_ENTRIES // len(atoms))
    codes = []
    gaps = []
    unsolved = []
    with ThreadPoolExecutor(threads or torch.get_num_threads()) as pool:
        for start in range(0, len(hidden), rows):
            batch = Batch.of(hidden[start : start + rows].numpy(), len(atoms))
            unsolved.append(start + _solve_batch(batch, prepared, lambda_, pool))
            codes.append(batch.codes(len(atoms)))
            gaps.append(batch.gaps)
    result = sp.vstack(codes, format="csr")
    gap = np.concatenate(gaps)
    left = np.concatenate(unsolved)
    if len(left):
        batched_codes, other_gap = solve_batched(hidden[torch.from_numpy(left)], atoms, lambda_)
        better = np.flatnonzero(other_gap < gap[left])
        order = np.arange(len(hidden))
        order[left[better]] = len(hidden) + better
        gap[left[better]] = other_gap[better]
        result = sp.vstack([result, batched_codes], format="csr")[order]
    return result, gap


@functools.cache
def compiler_is_there() -> bool:
    """Whether numba can be used here; logs a warning once if it cannot."""
    try:
        import mlsm_plugin.core.sparse_coding.active_set_kernel  # noqa: F401
    except ImportError as error:  # missing, or not compatible with the installed numpy
        logger.warning("coding will be several times slower, as numba cannot be used: %s", error)
        return False
    return True


def _solve_batch(batch: Batch, prepared: PreparedDictionary, lambda_: float, pool: ThreadPoolExecutor) -> np.ndarray:
    """Solve and check until every row is optimal, at most ``MAX_ROUNDS`` times; returns the remaining rows."""
    from mlsm_plugin.core.sparse_coding.active_set_kernel import advance_rows

    num_atoms, dim = prepared.atoms.shape
    rows: np.ndarray = np.arange(len(batch.hidden))
    vectors = batch.hidden
    # the first working set holds all atoms of a small dictionary
    limit = num_atoms if num_atoms <= 2 * dim else max(64, dim)
    floor = 0.0
    for round_ in range(MAX_ROUNDS):
        part = torch.from_numpy(vectors).float()
        correlations = (part @ prepared.atoms32.T).numpy()
        ranking = (part @ prepared.ridge.T).numpy() if round_ == 0 and limit < num_atoms else correlations
        optimal = np.zeros(len(rows), np.bool_)
        tasks = [
            pool.submit(
                advance_rows,
                first,
                min(first + ROWS_PER_TASK, len(rows)),
                rows,
                lambda_,
                batch.hidden,
                prepared.atoms,
                prepared.atoms32.numpy(),
                prepared.gram,
                correlations,
                ranking,
                limit,
                floor,
                prepared.rounding,
                batch.atoms,
                batch.weights,
                batch.sizes,
                batch.residuals,
                batch.gaps,
                optimal,
            )
            for first in range(0, len(rows), ROWS_PER_TASK)
        ]
        for task in tasks:
            task.result()
        rows = rows[~optimal]
        if len(rows) == 0:
            break
        vectors = batch.residuals[rows]
        # later working sets grow, so that a row cannot cycle forever
        limit = min(num_atoms, max(32, dim // 3) * max(1, round_ // 4))
        floor = NEAR_VIOLATION * lambda_
    return rows


@functools.lru_cache(maxsize=1)
def _prepared(contents: ArrayContents) -> PreparedDictionary:
    """The prepared dictionary, cached as long as the atoms stay the same."""
    atoms = contents.array
    double = torch.from_numpy(atoms)
    single = double.float()
    with_gram = len(atoms) ** 2 <= GRAM_ENTRIES
    largest_norm = float(torch.linalg.vector_norm(double, dim=1).max())
    return PreparedDictionary(
        atoms,
        single,
        (single @ single.T).numpy() if with_gram else np.zeros((0, 0), np.float32),
        ridge_ranking(double).float().contiguous(),
        # Higham, 2002, eq. 3.5, and the rounding of both vectors to float32
        (atoms.shape[1] + 3) * 2.0**-24 * largest_norm,
    )
