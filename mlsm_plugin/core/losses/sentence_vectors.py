"""Vectors of texts, made of hidden states, and what a narrower model learns of them (Reimers and Gurevych, 2020)."""

import logging

import numpy as np
from torch import Tensor

from mlsm_plugin.core.files.sentence_modules import CLS

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1024


def mean_vectors(hidden: Tensor, attended: Tensor) -> Tensor:
    """The means ``(B, d)`` of the hidden states ``(B, T, d)`` of all tokens except padding.

    Special tokens count, as in sentence-transformers. ``attended`` is ``(B, T)``, 0 for padding and 1 elsewhere.
    """
    weights = attended.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def pooled_vectors(hidden: Tensor, attended: Tensor, pooling: str) -> Tensor:
    """The vectors ``(B, d)`` of texts with hidden states ``(B, T, d)``, by ``mean`` or ``cls``, the first token's.

    ``attended`` is ``(B, T)``, 0 for padding and 1 elsewhere. The vector of a text without tokens is zero.
    """
    vectors = hidden[:, 0] if pooling == CLS else mean_vectors(hidden, attended)
    return vectors.where(attended.any(dim=1, keepdim=True), 0.0)


def vector_errors(predicted: Tensor, vectors: Tensor) -> Tensor:
    """The mean squared error ``(B,)`` float32 of predicted vectors ``(B, d)``; a text without a vector has none.

    ``vectors`` is ``(B, d)``; its row for a text without a vector is zero.
    """
    errors = (predicted.float() - vectors.float()).square().mean(dim=1)
    return errors.where(vectors.any(dim=1), 0.0)


def leading_directions(vectors: np.ndarray, width: int) -> np.ndarray:
    """The ``width`` orthonormal directions ``(d, width)`` float32 along which vectors ``(n, d)`` are longest.

    Of all maps to so few numbers, the projection on them keeps the vectors best (Eckart and Young, 1936), and so their
    products. The origin does not move. Warns if there are fewer vectors than directions, so that some are arbitrary.
    ValueError if ``width`` is not from 1 to ``d``, there are no vectors, or one is not finite.
    """
    if vectors.ndim != 2 or not 1 <= width <= vectors.shape[1] or len(vectors) == 0:
        raise ValueError(f"vectors of shape {vectors.shape} have no {width} directions")
    if len(vectors) < width:
        logger.warning("%d vectors do not determine %d directions; pass more text", len(vectors), width)
    moments = np.zeros((vectors.shape[1], vectors.shape[1]))
    for first in range(0, len(vectors), ROWS_AT_ONCE):
        part = vectors[first : first + ROWS_AT_ONCE].astype(np.float64)
        moments += part.T @ part
    if not np.isfinite(moments).all():
        raise ValueError("a vector is not finite")
    _, directions = np.linalg.eigh(moments)  # ascending
    return np.ascontiguousarray(directions[:, ::-1][:, :width], dtype=np.float32)


def share_kept(vectors: np.ndarray, directions: np.ndarray) -> float:
    """The share of the squared lengths of vectors ``(n, d)`` that their projections on directions ``(d, w)`` have."""
    lengths = np.square(vectors, dtype=np.float64).sum()
    return float(np.square(vectors @ directions, dtype=np.float64).sum() / lengths) if lengths else 1.0
