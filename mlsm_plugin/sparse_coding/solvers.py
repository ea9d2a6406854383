"""The solvers of :func:`mlsm_plugin.sparse_coding.encode.sparse_encode` by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.sparse_coding.active_set import solve_with_active_set
from mlsm_plugin.sparse_coding.duality_gap import DENSE_ENTRIES, relative_duality_gap, relative_gap_of_parts
from mlsm_plugin.sparse_coding.solver_settings import SolverSettings
from mlsm_plugin.sparse_coding.thread_counts import torch_threads

# FISTA gives up on a row after this many steps; its gap then shows how far it got
MAX_FISTA_STEPS = 10_000
# the gap costs as much as a step of FISTA, so it is not computed after every step
FISTA_STEPS_PER_CHECK = 10


def canonical_csr(codes: sp.csr_matrix) -> sp.csr_matrix:
    """``codes`` with sorted columns and no stored zeros, as a ``csr_matrix``."""
    codes = sp.csr_matrix(codes)
    codes.eliminate_zeros()
    codes.sort_indices()
    return codes


def has_spams() -> bool:
    """Whether spams is installed; the package can do without."""
    return importlib.util.find_spec("spams") is not None


def import_spams() -> Any:
    """The module ``spams``.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import spams
    except ImportError:
        raise ValueError("this needs spams: pip install spams-bin, or choose another solver or backend") from None
    return spams


@contextmanager
def spams_apart() -> Iterator[Any]:
    """The module ``spams``, for some calls that leave torch its number of threads.

    spams sets the threads of OpenMP for the whole process, and torch shares them. Raises as :func:`import_spams` does.
    """
    with torch_threads(None):
        yield import_spams()


def _solve_with_spams(hidden: torch.Tensor, atoms: np.ndarray, settings: SolverSettings) -> sp.csr_matrix:
    """Solve with the LARS homotopy of spams, in float64: in float32 it loses the path of some rows completely.

    spams takes columns in Fortran order, that is, the transposes of rows in C order. It aborts the process if the
    shapes disagree, so callers check them first.
    """
    with spams_apart() as spams:
        codes = spams.lasso(
            hidden.cpu().numpy().T,
            D=atoms.T,
            lambda1=settings.lambda_,
            mode=2,  # spams' PENALTY: 0.5 ||x - D a||^2 + lambda1 ||a||_1
            pos=True,
            L=-1 if settings.max_nonzeros is None else settings.max_nonzeros,
            numThreads=-1 if settings.threads is None else settings.threads,
        )
    return codes.T.tocsr()


def _solve_with_fista(hidden: torch.Tensor, atoms: np.ndarray, settings: SolverSettings) -> sp.csr_matrix:
    """Solve with FISTA (Beck and Teboulle, 2009) in float64 on ``settings.device``; ignores ``settings.threads``."""
    d = torch.tensor(atoms, device=settings.device)
    small_gram = d.T @ d if d.shape[0] > d.shape[1] else d @ d.T
    lipschitz = float(torch.linalg.eigvalsh(small_gram)[-1].clip(min=torch.finfo(d.dtype).tiny))
    rows = max(1, DENSE_ENTRIES // len(atoms))
    parts = [
        _fista_batch(hidden[start : start + rows], d, lipschitz, settings) for start in range(0, len(hidden), rows)
    ]
    return sp.vstack(parts, format="csr")


def _fista_batch(x: torch.Tensor, d: torch.Tensor, lipschitz: float, settings: SolverSettings) -> sp.csr_matrix:
    """Run FISTA on the rows of ``x`` (rows, dim) until each row's gap is small; finished rows leave the batch.

    The momentum of a row is reset when it points uphill (O'Donoghue and Candes, 2015).
    """
    finished = torch.zeros(len(x), len(d), dtype=x.dtype, device=x.device)
    active = torch.arange(len(x), device=x.device)
    a = torch.zeros_like(finished)
    y, t = a, torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
    for step in range(MAX_FISTA_STEPS):
        if step % FISTA_STEPS_PER_CHECK == 0:
            residual = x - a @ d
            largest = (residual @ d.T).amax(dim=1)
            gap = relative_gap_of_parts(x, residual, largest, settings.lambda_ * a.sum(dim=1), settings.lambda_)
            done = gap <= settings.tolerance
            finished[active[done]] = a[done]
            active, x, a, y, t = (tensor[~done] for tensor in (active, x, a, y, t))
            if len(active) == 0:
                break
        gradient = (y @ d - x) @ d.T + settings.lambda_
        new_a = (y - gradient / lipschitz).clip(min=0)
        uphill = ((y - new_a) * (new_a - a)).sum(dim=1, keepdim=True) > 0
        t = torch.where(uphill, torch.ones_like(t), t)
        new_t = (1 + torch.sqrt(1 + 4 * t**2)) / 2
        y = new_a + (t - 1) / new_t * (new_a - a)
        a, t = new_a, new_t
    finished[active] = a
    return sp.csr_matrix(finished.cpu().numpy())


def _certified(solve: Callable[[torch.Tensor, np.ndarray, SolverSettings], sp.csr_matrix]) -> Solver:
    """Turn a function that returns only codes into a solver that also computes their gaps."""

    def solve_and_certify(
        hidden: torch.Tensor, atoms: np.ndarray, settings: SolverSettings
    ) -> tuple[sp.csr_matrix, np.ndarray]:
        codes = solve(hidden, atoms, settings)
        return codes, relative_duality_gap(hidden.cpu().numpy(), atoms, codes, lambda_=settings.lambda_)

    return solve_and_certify


# A solver maps float64 hidden states (n_tokens, dim), on the device of the settings, and atoms (n_atoms, dim), both in
# C order, to codes (n_tokens, n_atoms) and their certified relative duality gaps (n_tokens,).
Solver = Callable[[torch.Tensor, np.ndarray, SolverSettings], tuple[sp.csr_matrix, np.ndarray]]
SOLVERS: dict[str, Solver] = {
    "active_set": solve_with_active_set,
    "spams": _certified(_solve_with_spams),
    "fista": _certified(_solve_with_fista),
}
# "auto" tries these in turn (spams only where it is installed), each for the rows that are still above the tolerance
AUTO_SOLVERS = ("active_set", "spams", "fista")
# the solvers that support max_nonzeros
LIMITING_SOLVERS = ("spams",)
