"""The protocol of sparse coders: what the rest of the package knows of every kind.

A coder turns hidden states into sparse, non-negative codes over atoms. The lasso over a dictionary
(:mod:`~mlsm_plugin.core.sparse_coding.lasso`) is the first kind. Everything that stores, trains on or shows codes
uses only this protocol, so that another kind is a single class, registered with
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
DENSE_ENTRIES = 2**22  # of a dense (rows, n_atoms) float64 temporary: 32 MB, whatever the size of the dictionary


@dataclass(frozen=True)
class SparseCodes:
    """The codes of a number of hidden states.

    The gaps are certified bounds on how far each code is from optimal, relative to its objective; None if the coder
    does not minimize an objective.
    """

    codes: sp.csr_matrix  # (n_tokens, n_atoms) float32, non-negative, column indices sorted, no stored zeros
    gap: np.ndarray | None = None  # (n_tokens,) float64


@dataclass(frozen=True)
class InexactCodes:
    """Codes that miss the accuracy that was requested."""

    rows: np.ndarray  # (n,) int, ascending: the rows of these codes
    reason: str  # text that follows "the codes" in an error message: what they miss, by how much, and what to change


@dataclass(frozen=True)
class NoOptions:
    """The options of a coder without options."""


class SparseCoder(ABC):
    """Turns hidden states into sparse codes.

    ``options_type`` is a dataclass of the settings that a user can choose when hidden states are coded. Each field is a
    :func:`~mlsm_plugin.core.files.settings.option` with a default; ``mlsm encode`` offers them as flags.

    ``meta`` is the origin of the coder, as values that JSON can hold. The package reads ``layer`` and
    ``auxiliary_fingerprint`` (the hidden states that it was learned from), ``blocks`` (how the text was cut) and
    ``health``, if they exist.
    """

    kind: ClassVar[str]  # name of this kind of coder, as in meta.json
    has_gaps: ClassVar[bool] = False  # whether encode gives the gaps of its codes
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
        """Code hidden states as the model returns them; a coder that needs normalized ones normalizes them here.

        They are a (n_tokens, dim) numpy array or torch tensor, finite; a tensor is coded on its device, on a CPU with
        this number of threads (None: all cores). ``mlsm encode`` calls this in several threads at once.
        """

    def encode_padded(
        self, hidden: HiddenStates, *, threads: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :meth:`encode`, as tensors beside those of ``hidden``, made without waiting for a GPU; None: not possible.

        They are atoms (n_tokens, k) int64 and weights (n_tokens, k) float32, not negative, those of 0 among them.
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
        """The hidden states (n_tokens, dim) float32 that codes stand for; ValueError if this kind does not reconstruct.

        ``hidden`` is what :meth:`encode` got; a coder that normalizes needs it to undo that.
        """
        raise ValueError(f"a coder of kind {self.kind!r} does not reconstruct hidden states")

    def directions(self) -> np.ndarray | None:
        """What each atom adds to a hidden state, ``(n_atoms, dim)``; None if this kind has no such directions."""
        return None

    def settings(self) -> JsonObject:
        """The settings that, together with the weights, decide the codes; for ``meta.json`` of a code store."""
        return {"coder": self.kind}

    def check(self) -> None:  # noqa: B027  (most kinds have nothing to check)
        """Raise ValueError if codes would be arbitrary, for example with two equal atoms."""

    def inexact(self, coded: SparseCodes) -> InexactCodes | None:
        """The codes that miss the requested accuracy, or None if all reach it."""
        return None

    def why_empty(self, hidden: HiddenStates) -> str:
        """Why all codes of ``hidden`` (n_tokens, dim) are empty, and what to do: text that follows "since"."""
        return "the coder gives no atom a positive weight; use a coder that was learned from these hidden states"


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch use this number of CPU threads in the block (None: unchanged)."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
