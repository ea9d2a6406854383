"""The smallest complete coder, for the tests of the protocol and of the registry."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import read_json, write_json, write_npy
from mlsm_plugin.core.files.planned_folder import META_FILE
from mlsm_plugin.core.sparse_coding.sparse_coder import SparseCoder, SparseCodes


@dataclass(frozen=True)
class ThresholdOptions:
    at_least: float = 0.25

    def __post_init__(self) -> None:
        if self.at_least < 0:
            raise ValueError(f"--at-least must not be negative, got {self.at_least}")


class ThresholdCoder(SparseCoder):
    """What of the inner products with the atoms is above a threshold."""

    kind = "threshold"
    options_type = ThresholdOptions

    def __init__(self, atoms: Any, meta: dict[str, Any], options: ThresholdOptions | None = None) -> None:
        self.atoms = np.asarray(atoms, np.float32)
        self.meta, self.options = meta, options or ThresholdOptions()

    @property
    def num_atoms(self) -> int:
        return len(self.atoms)

    @property
    def dim(self) -> int:
        return int(self.atoms.shape[1])

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.atoms.tobytes()).hexdigest()

    def encode(self, hidden: Any, *, threads: int | None = None) -> SparseCodes:
        products = np.asarray(hidden, np.float32) @ self.atoms.T
        return SparseCodes(sp.csr_matrix(np.where(products > self.options.at_least, products, 0)))

    def save(self, directory: str | os.PathLike[str]) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_npy(Path(directory, "atoms.npy"), self.atoms)
        write_json(Path(directory, META_FILE), {**self.meta, "kind": self.kind})

    @classmethod
    def load(cls, directory: str | os.PathLike[str], options: Any) -> ThresholdCoder:
        return cls(np.load(Path(directory, "atoms.npy")), read_json(Path(directory, META_FILE)), options)
