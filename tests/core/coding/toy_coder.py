"""A coder whose codes, gaps and complaints a test chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.sparse_coding.coder import InexactCodes, SparseCoder, SparseCodes


class ToyCoder(SparseCoder):
    """The two largest entries of a hidden state, where they are positive.

    Args:
        dim: width of the hidden states, and number of atoms.
        meta: where it says it comes from.
        tolerance: codes of a larger gap are inexact; the gap of a token is the square of its first entry.
        silent: whether all codes are empty.
    """

    kind = "toy"
    has_gaps = True

    def __init__(self, dim: int = 32, *, tolerance: float = 1e9, silent: bool = False, **meta: Any) -> None:
        self.width, self.meta, self.tolerance, self.silent = dim, meta, tolerance, silent
        self.sizes: list[int] = []

    @property
    def num_atoms(self) -> int:
        return self.width

    @property
    def dim(self) -> int:
        return self.width

    @property
    def fingerprint(self) -> str:
        return "0" * 64

    def encode(self, hidden: Any, *, threads: int | None = None) -> SparseCodes:
        hidden = torch.as_tensor(hidden).numpy().astype(np.float32)
        self.sizes.append(len(hidden))
        kept = np.zeros_like(hidden)
        if not self.silent:
            places = np.argsort(-hidden, axis=1)[:, :2]
            np.put_along_axis(kept, places, np.maximum(np.take_along_axis(hidden, places, axis=1), 0), axis=1)
        return SparseCodes(sp.csr_matrix(kept), hidden[:, 0].astype(np.float64) ** 2)

    def save(self, directory: Any) -> None:
        raise AssertionError("no test saves it")

    @classmethod
    def load(cls, directory: Any, options: Any) -> ToyCoder:
        raise AssertionError("no test loads it")

    def inexact(self, coded: SparseCodes) -> InexactCodes | None:
        assert coded.gap is not None
        rows = np.flatnonzero(coded.gap > self.tolerance)
        return InexactCodes(rows, "miss the toy's tolerance; use a larger one") if len(rows) else None

    def why_empty(self, hidden: Any) -> str:
        return "the toy is silent"
