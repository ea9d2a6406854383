"""The non-negative lasso: code hidden states over a dictionary, each code with a certified duality gap."""

from typing import overload

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.sparse_coding.active_set import solve_with_active_set
from mlsm_plugin.core.sparse_coding.spams_backend import solve_with_spams
from mlsm_plugin.core.sparse_coding.sparse_coder import HiddenStates, SparseCodes

ROWS_PER_CHUNK = 8192  # rows per call of a solver: 50 MB in float64 with 768 dimensions
SOLVERS = ("auto", "spams")


@overload
def normalize_rows(hidden: np.ndarray) -> np.ndarray: ...
@overload
def normalize_rows(hidden: torch.Tensor) -> torch.Tensor: ...
@overload
def normalize_rows(hidden: HiddenStates) -> HiddenStates: ...
def normalize_rows(hidden: HiddenStates) -> HiddenStates:
    """Divide each row by its L2 norm; a row of zeros stays zero, and gets an empty code.

    ``hidden`` is a (n_tokens, dim) numpy array or torch tensor of any float type. The result is of the same kind, on
    the same device; float64 if ``hidden`` is float64, else float32. Arrays and CPU tensors give exactly the same
    numbers.
    """
    if isinstance(hidden, torch.Tensor):
        rows = hidden.detach() if hidden.dtype == torch.float64 else hidden.detach().float()
        if rows.device.type == "cpu":
            return torch.from_numpy(normalize_rows(rows.numpy()))
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return rows / torch.where(norms > 0, norms, torch.ones_like(norms))
    array = np.asarray(hidden)
    array = array if array.dtype == np.float64 else array.astype(np.float32)
    norms = np.linalg.norm(array, axis=-1, keepdims=True)
    return array / np.where(norms > 0, norms, 1)


def sparse_encode(
    hidden: HiddenStates, dictionary: HiddenStates, *, lambda_: float, solver: str = "auto", threads: int | None = None
) -> SparseCodes:
    """Code each row ``x`` of ``hidden`` over the rows of ``dictionary``; the gaps are those of the float64 solution.

    The code is the non-negative lasso ``argmin over a >= 0 of 0.5 * ||x - a D||^2 + lambda_ * sum(a)`` (Berend, "Masked
    Latent Semantic Modeling", ACL Findings 2023). ``hidden`` is not normalized; to follow the paper, call
    :func:`normalize_rows` first. The published recipe is 100 steps of FISTA from zero; here every row is solved until
    its gap is certified. ValueError if an input is not 2-D, widths differ, a value is NaN or infinite, the dictionary
    is empty, or a setting is out of range.

    Args:
        hidden: (n_tokens, dim) numpy array or torch tensor.
        dictionary: (n_atoms, dim), unit rows by convention (not required here).
        lambda_: weight of the L1 penalty, > 0.
        solver: ``"auto"`` (the active set: exact and fastest, see :mod:`mlsm_plugin.core.sparse_coding.active_set`),
            which computes on the device of ``hidden``, or ``"spams"`` (homotopy, on the CPU, exact unless atoms are
            linearly dependent).
        threads: CPU threads of the compiled loops, None for all cores. Matrix products use torch's threads.
    """
    hidden = hidden.detach() if isinstance(hidden, torch.Tensor) else np.asarray(hidden)
    dictionary = as_array(dictionary)
    _check_arrays(hidden, dictionary)
    check_settings(lambda_, solver, threads)
    atoms = np.ascontiguousarray(dictionary, dtype=np.float64)
    codes: list[sp.csr_matrix] = []
    gaps: list[np.ndarray] = []
    for start in range(0, len(hidden), ROWS_PER_CHUNK):
        chunk = hidden[start : start + ROWS_PER_CHUNK]
        if not isinstance(chunk, torch.Tensor):
            chunk = torch.from_numpy(np.require(chunk, np.float64, ["C", "W"]))
        chunk = chunk.to(torch.float64).contiguous()
        if solver == "spams":
            chunk_codes, gap = solve_with_spams(chunk.cpu().numpy(), atoms, lambda_, threads)
        else:
            chunk_codes, gap = solve_with_active_set(chunk, atoms, lambda_, threads)
        chunk_codes = chunk_codes.astype(np.float32)
        chunk_codes.eliminate_zeros()
        chunk_codes.sort_indices()
        codes.append(chunk_codes)
        gaps.append(gap)
    if not codes:
        return SparseCodes(sp.csr_matrix((0, len(atoms)), dtype=np.float32), np.zeros(0))
    return SparseCodes(sp.vstack(codes, format="csr"), np.concatenate(gaps))


def target_distribution(codes: sp.csr_matrix) -> sp.csr_matrix:
    """Divide each code by its sum; this is the distribution over latent properties that MLSM predicts.

    ``codes`` are (n_tokens, n_atoms), non-negative. Returns float32 rows that sum to 1; empty rows stay empty.
    """
    codes = sp.csr_matrix(codes)
    sums = np.asarray(codes.sum(axis=1, dtype=np.float64)).ravel()
    divisors = np.repeat(np.where(sums > 0, sums, 1), np.diff(codes.indptr))
    return sp.csr_matrix(
        ((codes.data / divisors).astype(np.float32), codes.indices.copy(), codes.indptr.copy()), shape=codes.shape
    )


def as_array(values: HiddenStates) -> np.ndarray:
    """An array or tensor as a numpy array, if possible without a copy; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def _check_arrays(hidden: HiddenStates, dictionary: np.ndarray) -> None:
    if hidden.ndim != 2:
        raise ValueError(f"hidden must be 2-D (n_tokens, dim), got the shape {tuple(hidden.shape)}")
    if dictionary.ndim != 2:
        raise ValueError(f"dictionary must be 2-D (n_atoms, dim), got the shape {dictionary.shape}")
    if len(dictionary) == 0:
        raise ValueError("dictionary has no atoms; it must have at least one row")
    if hidden.shape[1] != dictionary.shape[1]:
        raise ValueError(
            f"hidden states are {hidden.shape[1]} wide but the atoms of the dictionary are {dictionary.shape[1]} wide; "
            "use the layer and model that the dictionary was learned from"
        )
    check_finite(hidden, "hidden row")
    check_finite(dictionary, "dictionary row")


def first_nonfinite_row(rows: HiddenStates) -> int | None:
    """The index of the first row of an array or tensor (n, dim) with NaN or infinity, or None."""
    for start in range(0, len(rows), ROWS_PER_CHUNK):
        chunk = rows[start : start + ROWS_PER_CHUNK]
        finite = torch.isfinite(chunk) if isinstance(chunk, torch.Tensor) else np.isfinite(chunk)
        bad = ~finite.all(1)
        if bad.any():
            return start + int(bad.nonzero()[0].reshape(-1)[0])
    return None


def check_finite(rows: HiddenStates, what: str) -> None:
    """Raise ValueError, with ``what`` and the row's number, if a row holds NaN or infinity."""
    row = first_nonfinite_row(rows)
    if row is not None:
        raise ValueError(f"{what} {row} holds NaN or infinity; all values must be finite")


def check_settings(lambda_: float, solver: str = SOLVERS[0], threads: int | None = None) -> None:
    """Raise ValueError if a setting of :func:`sparse_encode` is out of range."""
    if not 0 < lambda_ < np.inf:
        raise ValueError(f"lambda_ must be a positive number, got {lambda_}")
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be >= 1 or None, got {threads}")
