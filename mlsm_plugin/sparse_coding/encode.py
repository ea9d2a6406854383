"""Hidden states to sparse codes: the solvers, and the duality gap that certifies what they return."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

logger = logging.getLogger(__name__)

# Rows handed to a solver at a time: in float64 and 768 wide that is 50 MB.
ROWS_PER_CHUNK = 8192
# Entries of a dense (rows, n_atoms) float64 temporary: 32 MB whatever the size of the dictionary.
DENSE_ENTRIES = 2**22
# FISTA gives up on a row after so many steps; its gap then says how far it came.
MAX_FISTA_STEPS = 10_000
# The gap costs as much as a step of FISTA, so it is not computed after each of them.
FISTA_STEPS_PER_CHECK = 10


@dataclass(frozen=True)
class SparseCodes:
    """What :func:`sparse_encode` returns."""

    codes: sp.csr_matrix
    """(n_tokens, n_atoms) float32, non-negative, column indices sorted, no stored zeros."""
    gap: np.ndarray
    """(n_tokens,) float64, the certified relative duality gap of each row (:func:`relative_duality_gap`)."""


@dataclass(frozen=True)
class SolverSettings:
    """The settings that every solver receives; one that cannot honour a setting says so in its docstring."""

    lambda_: float
    """Weight of the l1 penalty."""
    tolerance: float
    """Relative duality gap at which an iterative solver may stop."""
    max_nonzeros: int | None
    """Most non-zeros of a code, or None for no limit."""
    threads: int | None
    """CPU threads, or None for all cores."""
    device: torch.device
    """Where the hidden states came from; solvers written in torch compute there."""


def normalize_rows(hidden: Any) -> Any:
    """Divide each row by its L2 norm; a row of zeros stays zero (its code is empty).

    Args:
        hidden: (n_tokens, dim) numpy array or torch tensor of any float type.

    Returns:
        The same kind of object, on the same device: float64 if ``hidden`` is, else float32.
    """
    if isinstance(hidden, torch.Tensor):
        rows = hidden if hidden.dtype == torch.float64 else hidden.float()
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return rows / torch.where(norms > 0, norms, torch.ones_like(norms))
    array = np.asarray(hidden)
    array = array if array.dtype == np.float64 else array.astype(np.float32)
    norms = np.linalg.norm(array, axis=-1, keepdims=True)
    return array / np.where(norms > 0, norms, 1)


def sparse_encode(
    hidden: Any,
    dictionary: Any,
    *,
    lambda_: float,
    solver: str = "auto",
    tolerance: float = 1e-4,
    max_nonzeros: int | None = None,
    threads: int | None = None,
) -> SparseCodes:
    """Code each row ``x`` of ``hidden`` over the rows of ``dictionary``.

    The code is the non-negative lasso ``argmin over a >= 0 of 0.5 * ||x - a D||^2 + lambda_ * sum(a)``
    (Berend, "Masked Latent Semantic Modeling", ACL Findings 2023). ``hidden`` is coded as it is given:
    divide it by its norms first with :func:`normalize_rows` to follow the paper. The published recipe is
    100 steps of FISTA from zero; here every row is solved until its gap is certified.

    Args:
        hidden: (n_tokens, dim) numpy array or torch tensor.
        dictionary: (n_atoms, dim), unit rows by convention (nothing here needs them).
        lambda_: weight of the l1 penalty, > 0.
        solver: ``"spams"`` (homotopy, exact unless atoms are linearly dependent), ``"fista"`` (iterates
            until the gap is <= ``tolerance``), or ``"auto"``: spams, then FISTA for the rows that spams left
            above ``tolerance``.
        tolerance: relative duality gap to reach. Rows that miss it are counted in a warning of the log.
        max_nonzeros: stop spams' path at so many non-zeros; such codes are no minimizers and their gap says so.
        threads: CPU threads of spams, None for all cores. FISTA runs on torch's own threads, or on the
            device of ``hidden``.

    Returns:
        :class:`SparseCodes`. The gap is that of the float64 solution, before the weights become float32.

    Raises:
        ValueError: an input is not 2-D, widths differ, a value is NaN or infinite, the dictionary is empty,
            or a setting is out of range.
    """
    device = hidden.device if isinstance(hidden, torch.Tensor) else torch.device("cpu")
    hidden, dictionary = _as_array(hidden), _as_array(dictionary)
    _check_arrays(hidden, dictionary)
    _check_settings(lambda_, solver, tolerance, max_nonzeros, threads)
    settings = SolverSettings(float(lambda_), float(tolerance), max_nonzeros, threads, device)
    atoms = np.ascontiguousarray(dictionary, dtype=np.float64)

    codes: list[sp.csr_matrix] = []
    gaps: list[np.ndarray] = []
    for start in range(0, len(hidden), ROWS_PER_CHUNK):
        chunk = np.ascontiguousarray(hidden[start : start + ROWS_PER_CHUNK], dtype=np.float64)
        chunk_codes, chunk_gap = _encode_chunk(chunk, atoms, solver, settings)
        codes.append(chunk_codes.astype(np.float32))
        gaps.append(chunk_gap)
    if not codes:
        return SparseCodes(sp.csr_matrix((0, len(atoms)), dtype=np.float32), np.zeros(0))

    gap = np.concatenate(gaps)
    missed = int((gap > tolerance).sum())
    if missed and max_nonzeros is None:
        logger.warning(
            "%d of %d codes miss the relative duality gap %g; the worst is %.3g", missed, len(gap), tolerance, gap.max()
        )
    return SparseCodes(_canonical(sp.vstack(codes, format="csr")), gap)


def relative_duality_gap(
    hidden: np.ndarray, dictionary: np.ndarray, codes: sp.csr_matrix, *, lambda_: float
) -> np.ndarray:
    """Upper bound on how far each code is from optimal, relative to its objective.

    With ``r = x - a D`` and ``P(a) = 0.5 * ||r||^2 + lambda_ * sum(a)``, the point
    ``theta = r * min(1, lambda_ / max_j (D r)_j)`` satisfies ``D theta <= lambda_`` and is thus feasible for
    the dual ``0.5 * ||x||^2 - 0.5 * ||x - theta||^2``, whose value Q(theta) no primal value undercuts (Fenchel
    duality; Mairal, 2010, appendix D). The gap is ``(P(a) - Q(theta)) / P(a) >= (P(a) - min P) / P(a)``.
    Computed in float64, a bounded number of rows at a time.

    Args:
        hidden: (n_tokens, dim) float.
        dictionary: (n_atoms, dim) float.
        codes: (n_tokens, n_atoms), non-negative.
        lambda_: weight of the l1 penalty.

    Returns:
        (n_tokens,) float64 in [0, 1]; 0 for a row of zeros with an empty code.
    """
    atoms = np.asarray(dictionary, dtype=np.float64)
    gap = np.empty(len(hidden))
    rows = max(1, DENSE_ENTRIES // len(atoms))
    for start in range(0, len(hidden), rows):
        chunk = slice(start, start + rows)
        x = np.asarray(hidden[chunk], dtype=np.float64)
        part = codes[chunk].astype(np.float64)
        residual = x - part @ atoms  # (rows, dim)
        penalty = lambda_ * np.asarray(part.sum(axis=1)).ravel()
        gap[chunk] = _relative_gap(x, residual, (residual @ atoms.T).max(axis=1), penalty, lambda_)
    return gap


def target_distribution(codes: sp.csr_matrix) -> sp.csr_matrix:
    """Divide each code by its sum: the distribution over latent properties that MLSM predicts.

    Args:
        codes: (n_tokens, n_atoms), non-negative.

    Returns:
        (n_tokens, n_atoms) float32 whose rows sum to 1; empty rows stay empty.
    """
    codes = sp.csr_matrix(codes)
    sums = np.asarray(codes.sum(axis=1, dtype=np.float64)).ravel()
    divisors = np.repeat(np.where(sums > 0, sums, 1), np.diff(codes.indptr))
    return sp.csr_matrix(
        ((codes.data / divisors).astype(np.float32), codes.indices.copy(), codes.indptr.copy()), shape=codes.shape
    )


def _solve_with_spams(hidden: np.ndarray, atoms: np.ndarray, settings: SolverSettings) -> sp.csr_matrix:
    """LARS homotopy of spams, in float64: in float32 it loses the path of some rows altogether.

    spams takes columns in Fortran order, which the transposes of C-ordered rows are, and aborts the process
    when the shapes disagree, so they are checked before this is called.
    """
    import spams

    codes = spams.lasso(
        hidden.T,
        D=atoms.T,
        lambda1=settings.lambda_,
        mode=2,  # spams' PENALTY: 0.5 ||x - D a||^2 + lambda1 ||a||_1
        pos=True,
        L=-1 if settings.max_nonzeros is None else settings.max_nonzeros,
        numThreads=-1 if settings.threads is None else settings.threads,
    )
    return codes.T.tocsr()


def _solve_with_fista(hidden: np.ndarray, atoms: np.ndarray, settings: SolverSettings) -> sp.csr_matrix:
    """FISTA (Beck and Teboulle, 2009), float64, on ``settings.device``; ignores ``settings.threads``."""
    d = torch.tensor(atoms, device=settings.device)
    small_gram = d.T @ d if d.shape[0] > d.shape[1] else d @ d.T
    lipschitz = float(torch.linalg.eigvalsh(small_gram)[-1].clip(min=torch.finfo(d.dtype).tiny))
    rows = max(1, DENSE_ENTRIES // len(atoms))
    parts = [
        _fista_batch(torch.tensor(hidden[start : start + rows], device=settings.device), d, lipschitz, settings)
        for start in range(0, len(hidden), rows)
    ]
    return sp.vstack(parts, format="csr")


def _fista_batch(x: torch.Tensor, d: torch.Tensor, lipschitz: float, settings: SolverSettings) -> sp.csr_matrix:
    """Run FISTA on the rows of ``x`` (rows, dim) until each row's gap is small; finished rows leave the batch.

    The momentum of a row starts anew when it points uphill (O'Donoghue and Candes, 2015).
    """
    finished = torch.zeros(len(x), len(d), dtype=x.dtype, device=x.device)
    active = torch.arange(len(x), device=x.device)
    a = torch.zeros_like(finished)
    y, t = a, torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
    for step in range(MAX_FISTA_STEPS):
        if step % FISTA_STEPS_PER_CHECK == 0:
            residual = x - a @ d
            largest = (residual @ d.T).amax(dim=1)
            gap = _relative_gap(x, residual, largest, settings.lambda_ * a.sum(dim=1), settings.lambda_)
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


Solver = Callable[[np.ndarray, np.ndarray, SolverSettings], sp.csr_matrix]
# A solver maps float64 (n_tokens, dim) and (n_atoms, dim), both in C order, to (n_tokens, n_atoms).
SOLVERS: dict[str, Solver] = {"spams": _solve_with_spams, "fista": _solve_with_fista}
# "auto" tries these in turn, each on the rows that the one before it left above the tolerance.
AUTO_SOLVERS = ("spams", "fista")
# The solvers that honour max_nonzeros.
LIMITING_SOLVERS = ("spams",)


def _encode_chunk(
    chunk: np.ndarray, atoms: np.ndarray, solver: str, settings: SolverSettings
) -> tuple[sp.csr_matrix, np.ndarray]:
    """Codes (float64) and gaps of the rows of ``chunk``."""
    names: tuple[str, ...] = (solver,)
    if solver == "auto":
        names = AUTO_SOLVERS if settings.max_nonzeros is None else LIMITING_SOLVERS
    codes = _canonical(SOLVERS[names[0]](chunk, atoms, settings))
    gap = relative_duality_gap(chunk, atoms, codes, lambda_=settings.lambda_)
    for name in names[1:]:
        open_rows = np.flatnonzero(gap > settings.tolerance)
        if len(open_rows) == 0:
            break
        again = _canonical(SOLVERS[name](chunk[open_rows], atoms, settings))
        order = np.arange(len(chunk))
        order[open_rows] = len(chunk) + np.arange(len(open_rows))
        codes = sp.vstack([codes, again], format="csr")[order]
        gap[open_rows] = relative_duality_gap(chunk[open_rows], atoms, again, lambda_=settings.lambda_)
    return codes, gap


def _relative_gap(x: Any, residual: Any, largest: Any, penalty: Any, lambda_: float) -> Any:
    """The gap of :func:`relative_duality_gap` from its parts, for numpy arrays and torch tensors alike.

    Args:
        x: (rows, dim).
        residual: (rows, dim), ``x - a D``.
        largest: (rows,), the largest entry of ``D r``.
        penalty: (rows,), ``lambda_ * sum(a)``.
        lambda_: weight of the l1 penalty.
    """
    scale = lambda_ / largest.clip(min=lambda_)
    squared_residual = (residual * residual).sum(-1)
    primal = 0.5 * squared_residual + penalty
    dual = scale * (x * residual).sum(-1) - 0.5 * scale**2 * squared_residual
    return ((primal - dual) / primal.clip(min=np.finfo(np.float64).tiny)).clip(min=0, max=1)


def _canonical(codes: sp.csr_matrix) -> sp.csr_matrix:
    """``codes`` with sorted columns and no stored zeros, as a ``csr_matrix``."""
    codes = sp.csr_matrix(codes)
    codes.eliminate_zeros()
    codes.sort_indices()
    return codes


def _as_array(values: Any) -> np.ndarray:
    """A numpy view of an array or tensor (bfloat16, which numpy lacks, becomes float32)."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def _check_arrays(hidden: np.ndarray, dictionary: np.ndarray) -> None:
    """Reject shapes and values that cannot be coded.

    Raises:
        ValueError: see :func:`sparse_encode`.
    """
    if hidden.ndim != 2:
        raise ValueError(f"hidden must be 2-D (n_tokens, dim), got the shape {hidden.shape}")
    if dictionary.ndim != 2:
        raise ValueError(f"dictionary must be 2-D (n_atoms, dim), got the shape {dictionary.shape}")
    if len(dictionary) == 0:
        raise ValueError("dictionary has no atoms; it must have at least one row")
    if hidden.shape[1] != dictionary.shape[1]:
        raise ValueError(
            f"hidden states are {hidden.shape[1]} wide but the atoms of the dictionary are {dictionary.shape[1]} wide; "
            "use the layer and model that the dictionary was learned from"
        )
    for name, array in (("hidden", hidden), ("dictionary", dictionary)):
        row = first_nonfinite_row(array)
        if row is not None:
            raise ValueError(f"{name} row {row} holds NaN or infinity; all values must be finite")


def first_nonfinite_row(array: np.ndarray) -> int | None:
    """Index of the first row of ``array`` (n, dim) that holds NaN or infinity, or None."""
    for start in range(0, len(array), ROWS_PER_CHUNK):
        bad = ~np.isfinite(array[start : start + ROWS_PER_CHUNK]).all(axis=1)
        if bad.any():
            return start + int(bad.argmax())
    return None


def _check_settings(
    lambda_: float, solver: str, tolerance: float, max_nonzeros: int | None, threads: int | None
) -> None:
    """Reject settings out of range.

    Raises:
        ValueError: see :func:`sparse_encode`.
    """
    if not 0 < lambda_ < np.inf:
        raise ValueError(f"lambda_ must be a positive number, got {lambda_}")
    if solver != "auto" and solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; choose one of {', '.join(['auto', *SOLVERS])}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be > 0, got {tolerance}")
    if max_nonzeros is not None:
        if max_nonzeros < 1:
            raise ValueError(f"max_nonzeros must be >= 1 or None, got {max_nonzeros}")
        if solver not in ("auto", *LIMITING_SOLVERS):
            raise ValueError(
                f"solver {solver!r} cannot limit the non-zeros; leave max_nonzeros out or use "
                f"{' or '.join(LIMITING_SOLVERS)}"
            )
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be >= 1 or None, got {threads}")
