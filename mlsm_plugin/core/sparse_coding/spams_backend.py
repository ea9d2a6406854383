"""Everything that uses spams: its LARS homotopy as a solver, and ``spams.trainDL`` as a learner.

spams sets the number of OpenMP threads for the whole process, including torch. It takes columns in Fortran order, that
is, transposes of rows in C order. It aborts the process if shapes disagree, so callers check them first.
"""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.sparse_coding.active_set_torch import relative_gap_of_parts
from mlsm_plugin.core.sparse_coding.sparse_coder import DENSE_ENTRIES, torch_threads

# spams shows no progress during a call, so each call gets a few mini-batches. With 10 per call, the held-out objective
# on hidden states of a pre-trained model (512 atoms, 384 wide) is 1.0003 times that of a single call after 100
# mini-batches, and 0.998 times after 300; with 1 per call it is worse (1.07 times).
BATCHES_PER_CALL = 10
PENALTY = 2  # spams' mode: 0.5 ||x - D a||^2 + lambda1 ||a||_1


def _spams() -> ModuleType:
    try:
        import spams
    except ImportError:
        raise ValueError("this needs spams: pip install spams-bin, or choose another solver or backend") from None
    return spams


def solve_with_spams(
    hidden: np.ndarray, atoms: np.ndarray, lambda_: float, threads: int | None
) -> tuple[sp.csr_matrix, np.ndarray]:
    """Codes (n_tokens, n_atoms) of rows, and their certified relative duality gaps (n_tokens,).

    Everything is float64, since in float32 spams loses the path of some rows completely. ValueError if spams is not
    installed.
    """
    with torch_threads(None):
        columns = _spams().lasso(
            hidden.T, D=atoms.T, lambda1=lambda_, mode=PENALTY, pos=True, numThreads=-1 if threads is None else threads
        )
    codes = columns.T.tocsr()
    gaps = np.empty(len(hidden))
    step = max(1, DENSE_ENTRIES // len(atoms))
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        residual = hidden[rows] - codes[rows] @ atoms
        penalty = lambda_ * np.asarray(codes[rows].sum(axis=1)).ravel()
        gaps[rows] = relative_gap_of_parts(hidden[rows], residual, (residual @ atoms.T).max(axis=1), penalty, lambda_)
    return codes, gaps


def learn_with_spams(
    parts: Iterator[np.ndarray],
    initial: np.ndarray,
    *,
    lambda_: float,
    iterations: int,
    batch_size: int,
    threads: int | None,
) -> np.ndarray:
    """Learn from a few mini-batches per call of spams, passing on its state: (n_atoms, dim), norms at most 1.

    ``parts`` yields rows (n, dim) float32 of ``BATCHES_PER_CALL`` mini-batches each, endlessly. ``initial`` is the
    first dictionary. Settings are those of
    :func:`~mlsm_plugin.core.sparse_coding.dictionary.learn_dictionary`. ValueError if spams is not installed.
    """
    learned = initial.T.copy(order="F")
    state: dict[str, object] = {}
    done = 0  # the bar does not count if TQDM_DISABLE is set
    with Progress(total=iterations, desc="learning the dictionary", unit="batch") as progress, torch_threads(None):
        while done < iterations:
            count = min(BATCHES_PER_CALL, iterations - done)
            learned, model = _spams().trainDL(
                next(parts).T,  # without a copy
                D=np.asfortranarray(learned),
                lambda1=lambda_,
                iter=count,
                batchsize=batch_size,
                mode=PENALTY,
                posAlpha=True,
                numThreads=-1 if threads is None else threads,
                verbose=False,
                return_model=True,
                **state,
            )
            state = {"model": model}
            done += count
            progress.update(count)
    return learned.T
