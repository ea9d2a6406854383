"""Keep a few atoms of each code, before the code becomes a distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.sparse_coding.duality_gap import DENSE_ENTRIES

WEIGHT = "weight"
ATTRIBUTION = "attribution"
ABSOLUTE_ATTRIBUTION = "absolute-attribution"
SELECTIONS = (WEIGHT, ATTRIBUTION, ABSOLUTE_ATTRIBUTION)


@dataclass(frozen=True)
class CodeSelection:
    """Which atoms of a code are kept.

    Attributes:
        top: how many atoms; None: all.
        by: ``weight``: those with the largest weights. ``attribution``: those with the largest product of weight and
            gradient of the auxiliary model's own loss with respect to the weight, as CoCoMix selects concepts (Tack et
            al., 2025, arXiv 2502.08524). ``absolute-attribution``: those with the largest magnitude of this product.

    Raises:
        ValueError: ``top`` is less than 1, or ``by`` is unknown or given without ``top``.
    """

    top: int | None = None
    by: str = WEIGHT

    def __post_init__(self) -> None:
        if self.top is not None and self.top < 1:
            raise ValueError(f"--latent-top must be at least 1, got {self.top}")
        if self.by not in SELECTIONS:
            raise ValueError(f"--latent-select must be one of {', '.join(SELECTIONS)}, got {self.by!r}")
        if self.top is None and self.by != WEIGHT:
            raise ValueError(f"--latent-select {self.by} needs --latent-top: how many atoms of a code are kept")

    @property
    def needs_gradients(self) -> bool:
        """Whether the selection depends on the auxiliary model's loss."""
        return self.by != WEIGHT

    def settings(self) -> dict[str, Any]:
        """For the ``meta.json`` of a code store; empty if all atoms are kept."""
        return {} if self.top is None else {"latent_top": self.top, "latent_select": self.by}

    def select(
        self, codes: sp.csr_matrix, gradients: np.ndarray | None = None, directions: np.ndarray | None = None
    ) -> sp.csr_matrix:
        """The codes with the kept atoms only; their weights stay as they are.

        Args:
            codes: (n, n_atoms), non-negative, sorted columns.
            gradients: (n, dim) of the loss with respect to the hidden states, for a selection by attribution.
            directions: (n_atoms, dim), what each atom adds to a hidden state, for the same.

        Returns:
            (n, n_atoms) with at most ``top`` entries in each row. Of equal scores, the atom with the smaller number is
            kept.
        """
        if self.top is None or codes.nnz == 0:
            return codes
        scores = codes.data.astype(np.float64)
        if self.needs_gradients:
            assert gradients is not None
            assert directions is not None
            scores = scores * _products(codes, gradients, directions)
            scores = np.abs(scores) if self.by == ABSOLUTE_ATTRIBUTION else scores
        lengths = np.diff(codes.indptr)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        order = np.lexsort((codes.indices, -scores, rows))
        rank = np.arange(codes.nnz) - np.repeat(codes.indptr[:-1], lengths)  # within its row, in this order
        kept = np.sort(order[rank < self.top])
        indptr = np.concatenate([[0], np.cumsum(np.minimum(lengths, self.top))])
        return sp.csr_matrix((codes.data[kept], codes.indices[kept], indptr), shape=codes.shape)


ALL_ATOMS = CodeSelection()


def without_negative_codes(codes: sp.csr_matrix) -> sp.csr_matrix:
    """The codes, where those with a negative weight are empty: they cannot become a distribution.

    Args:
        codes: (n, n_atoms), of a coder whose latents can be negative.
    """
    if codes.nnz == 0 or codes.data.min() >= 0:
        return codes
    rows = np.repeat(np.arange(codes.shape[0]), np.diff(codes.indptr))
    negative = np.zeros(codes.shape[0], bool)
    negative[rows[codes.data < 0]] = True
    kept = ~negative[rows]
    indptr = np.concatenate([[0], np.cumsum(np.where(negative, 0, np.diff(codes.indptr)))])
    return sp.csr_matrix((codes.data[kept], codes.indices[kept], indptr), shape=codes.shape)


def _products(codes: sp.csr_matrix, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The entries of ``left @ right.T`` at the entries of ``codes``, in their order."""
    products = np.empty(codes.nnz)
    step = max(1, DENSE_ENTRIES // codes.shape[1])
    for start in range(0, codes.shape[0], step):
        part = codes[start : start + step]
        rows = np.repeat(np.arange(part.shape[0]), np.diff(part.indptr))
        dense = left[start : start + step] @ right.T
        products[codes.indptr[start] : codes.indptr[start] + part.nnz] = dense[rows, part.indices]
    return products


def strongest_of_padded(atoms: np.ndarray, weights: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``top`` atoms of each row of stored codes with the largest weights, as distributions again.

    Args:
        atoms: (n, m) int32, padded with -1.
        weights: (n, m) float16, padded with 0.
        top: how many.

    Returns:
        atoms and weights (n, min(m, top)), padded in the same way; the weights of a row sum to 1, or are all 0.
    """
    if atoms.shape[1] <= top:
        return atoms, weights
    kept = np.sort(np.argsort(-weights, axis=1, kind="stable")[:, :top], axis=1)
    weights = np.take_along_axis(weights, kept, axis=1).astype(np.float32)
    sums = weights.sum(axis=1, keepdims=True)
    weights = (weights / np.where(sums > 0, sums, 1)).astype(np.float16)
    return np.take_along_axis(atoms, kept, axis=1), weights
