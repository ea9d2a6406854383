"""A dictionary of any origin: an npy file of a matrix whose rows are atoms."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from mlsm_plugin.files.npy_files import read_npy
from mlsm_plugin.sparse_coding.dictionary import UNIT_NORM_TOLERANCE, Dictionary
from mlsm_plugin.sparse_coding.encode import normalize_rows

NAME = "npy"


def read_npy_matrix(
    path: str | os.PathLike[str], *, normalize: bool = False, transpose: bool = False, lambda_: float | None = None
) -> Dictionary:
    """Read a matrix as the dictionary of a lasso.

    Args:
        path: a file of shape (n_atoms, dim), real numbers.
        normalize: scale each atom to unit norm.
        transpose: the file is (dim, n_atoms).
        lambda_: weight of the L1 penalty, > 0; None: ``mlsm encode --lambda`` says it.

    Raises:
        ValueError: the file is not such a matrix; an atom is zero, or does not have unit norm without ``normalize``;
            ``lambda_`` is out of range.
    """
    if lambda_ is not None and not 0 < lambda_ < np.inf:
        raise ValueError(f"--lambda must be a positive number, got {lambda_}")
    array = read_npy(path)
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"{path} must be a matrix (n_atoms, dim) of real numbers, got {array.dtype} of the shape {array.shape}"
        )
    atoms = np.asarray(array.T if transpose else array, np.float32)
    if not np.isfinite(atoms).all():
        raise ValueError(f"{path} holds NaN, infinity or numbers beyond float32; all values must be finite")
    norms = np.linalg.norm(atoms, axis=1)
    if not norms.all():
        raise ValueError(f"{path}: atom {int(norms.argmin())} is zero; leave it out")
    if normalize:
        atoms = normalize_rows(atoms)
    elif (worst := float(np.abs(norms - 1).max())) > UNIT_NORM_TOLERANCE:
        row = int(np.abs(norms - 1).argmax())
        other = np.abs(np.linalg.norm(atoms, axis=0) - 1).max() < min(worst, UNIT_NORM_TOLERANCE)
        advice = "its columns have, so pass --transpose" if other else "pass --normalize to scale them"
        raise ValueError(f"{path}: row {row} has the norm {norms[row]:.4g}, but atoms have unit norm; {advice}")
    meta: dict[str, Any] = {"imported_from": {"format": NAME, "file": Path(path).name}}
    if lambda_ is not None:
        meta["lambda"] = lambda_
    return Dictionary(atoms, meta)
