"""The interface of sparse coders, which the rest of the package uses for every kind.

A coder turns hidden states into sparse, non-negative codes over atoms. The lasso over a dictionary
(:mod:`~mlsm_plugin.core.sparse_coding.lasso`) is one kind. Everything that stores, trains on or shows codes uses only
this interface, so a new kind is a single class, registered with
:func:`~mlsm_plugin.core.sparse_coding.coder.register_coder`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import JsonObject

HiddenStates = np.ndarray | torch.Tensor  # (n_tokens, dim)
DENSE_ENTRIES = 2**22  # entries of a dense (rows, n_atoms) float64 temporary: 32 MB for any size of the dictionary


@dataclass(frozen=True)
class SparseCodes:
    """The codes of several hidden states.

    ``gap`` is a certified bound on how far each code is from optimal, relative to its objective; None if the coder does
    not minimize an objective.
    """

    codes: sp.csr_matrix  # (n_tokens, n_atoms) float32, non-negative, column indices sorted, no stored zeros
    gap: np.ndarray | None = None  # (n_tokens,) float64


@dataclass(frozen=True)
class InexactCodes:
    """Codes that miss the requested accuracy."""

    rows: np.ndarray  # (n,) int, ascending: the rows of these codes
    reason: str  # continues "the codes" in an error: what they miss, by how much, and what to change


@dataclass(frozen=True)
class NoOptions:
    """The options of a coder without options."""


class SparseCoder(ABC):
    """Turns hidden states into sparse codes.

    ``options_type`` is a dataclass of the settings that a user can choose for coding. Each field is a
    :func:`~mlsm_plugin.core.files.settings.option` with a default; ``mlsm encode`` offers them as flags.

    ``meta`` is the origin of the coder, as JSON values. The package reads ``layer`` and ``auxiliary_fingerprint`` (the
    hidden states that it was learned from), ``blocks`` (how the text was cut) and ``health``, if they exist.
    """

    kind: ClassVar[str]  # name of this kind of coder, as in meta.json
    has_gaps: ClassVar[bool] = False  # whether encode returns the gaps of its codes
    options_type: ClassVar[type] = NoOptions
    meta: JsonObject

    @property
    @abstractmethod
    def num_atoms(self) -> int:
        """The number of columns of the codes."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """The width of the hidden states."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the weights."""

    @abstractmethod
    def encode(self, hidden: HiddenStates, *, threads: int | None = None) -> SparseCodes:
        """Code hidden states as the model returns them; a coder that needs normalized states normalizes them here.

        They are a finite (n_tokens, dim) numpy array or torch tensor. A tensor is coded on its device, on a CPU with
        this number of threads (None: all cores). ``mlsm encode`` calls this in several threads at once.
        """

    def encode_padded(
        self, hidden: HiddenStates, *, threads: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :meth:`encode`, but tensors on the device of ``hidden``, without waiting for a GPU; None if not possible.

        Returns atoms (n_tokens, k) int64 and non-negative weights (n_tokens, k) float32, which may be 0.
        """
        return None

    @abstractmethod
    def save(self, directory: PathLike) -> None:
        """Write the folder of the coder; ``meta.json``, which holds ``"kind"``, is written last."""

    @classmethod
    @abstractmethod
    def load(cls, directory: PathLike, options: Any) -> "SparseCoder":
        """Load a folder that :meth:`save` wrote; ``options`` is an instance of ``options_type``.

        ValueError if files are missing or damaged (names the folder).
        """

    def reconstruct(self, hidden: HiddenStates, codes: sp.csr_matrix) -> np.ndarray:
        """Reconstruct hidden states (n_tokens, dim) float32 from codes; ValueError if this kind cannot.

        ``hidden`` is the input of :meth:`encode`; a coder that normalizes needs it to undo the normalization.
        """
        raise ValueError(f"a coder of kind {self.kind!r} does not reconstruct hidden states")

    def directions(self) -> np.ndarray | None:
        """The vector that each atom adds to a hidden state, ``(n_atoms, dim)``; None if there are no such vectors."""
        return None

    def settings(self) -> JsonObject:
        """The settings that decide the codes, together with the weights; for the ``meta.json`` of a code store."""
        return {"coder": self.kind}

    def check(self) -> None:  # noqa: B027  (most kinds have nothing to check)
        """Raise ValueError if codes would be arbitrary, for example with two equal atoms."""

    def inexact(self, coded: SparseCodes) -> InexactCodes | None:
        """The codes that miss the requested accuracy, or None if all reach it."""
        return None

    def why_empty(self, hidden: HiddenStates) -> str:
        """Why all codes of ``hidden`` (n_tokens, dim) are empty, and what to do; continues "since"."""
        return "the coder gives no atom a positive weight; use a coder that was learned from these hidden states"


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of CPU threads for the block (None: unchanged)."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
