"""A kind of sparse coder: the non-negative lasso over a learned dictionary (Berend, ACL Findings 2023)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.settings import check, option
from mlsm_plugin.core.sparse_coding.dictionary import KIND, AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import SOLVERS, as_array, check_settings, normalize_rows, sparse_encode
from mlsm_plugin.core.sparse_coding.sparse_coder import (
    DENSE_ENTRIES,
    HiddenStates,
    InexactCodes,
    SparseCoder,
    SparseCodes,
)


@dataclass(frozen=True)
class LassoOptions:
    """Options for computing codes; ValueError if a value is out of range."""

    lambda_: float | None = option(None, above=0, help="weight of the L1 penalty (default: that of the dictionary)")
    solver: str = option(
        "auto",
        choices=SOLVERS,
        help="auto: this package's exact active-set solver; spams: the homotopy of SPAMS, on the CPU",
    )
    tolerance: float = option(
        1e-4, above=0, help="largest certified relative duality gap of a code; codes above it are not written"
    )

    def __post_init__(self) -> None:
        check(self)


class LassoCoder(SparseCoder):
    """Codes ``argmin over a >= 0 of 0.5 * ||x - a D||^2 + lambda * sum(a)`` of normalized hidden states ``x``.

    The rows of ``D`` are the atoms. ValueError if neither the options nor the dictionary have a lambda.
    """

    kind: ClassVar[str] = KIND
    has_gaps: ClassVar[bool] = True
    options_type: ClassVar[type] = LassoOptions

    def __init__(self, dictionary: AtomDictionary, options: LassoOptions | None = None) -> None:
        options = options or LassoOptions()
        self.dictionary = dictionary
        self.options = options
        self.meta = dictionary.meta
        lambda_ = dictionary.meta.get("lambda") if options.lambda_ is None else options.lambda_
        if lambda_ is None:
            raise ValueError("the dictionary does not say its lambda; pass the weight of the L1 penalty")
        self.lambda_ = float(lambda_)
        check_settings(self.lambda_, options.solver)

    @property
    def num_atoms(self) -> int:
        return len(self.dictionary.atoms)

    def directions(self) -> np.ndarray:
        return self.dictionary.atoms

    @property
    def dim(self) -> int:
        return int(self.dictionary.atoms.shape[1])

    @property
    def fingerprint(self) -> str:
        return self.dictionary.fingerprint

    def encode(self, hidden: HiddenStates, *, threads: int | None = None) -> SparseCodes:
        """Codes with certified gaps; each row of ``hidden`` is first divided by its L2 norm."""
        atoms = self.dictionary.atoms
        solver = self.options.solver
        return sparse_encode(normalize_rows(hidden), atoms, lambda_=self.lambda_, solver=solver, threads=threads)

    def reconstruct(self, hidden: HiddenStates, codes: sp.csr_matrix) -> np.ndarray:
        """``a D``, multiplied by the norms of ``hidden`` to undo the normalization."""
        rows = as_array(hidden)
        norms = np.linalg.norm(rows.astype(np.float32), axis=1, keepdims=True)
        return np.asarray(codes @ self.dictionary.atoms) * norms

    def save(self, directory: PathLike) -> None:
        self.dictionary.save(directory)

    @classmethod
    def load(cls, directory: PathLike, options: Any) -> "LassoCoder":
        dictionary = AtomDictionary.load(directory)
        if dictionary.meta.get("lambda") is None and options.lambda_ is None:
            raise ValueError(
                f"{directory} does not say its lambda; pass --lambda to `mlsm encode`, or import it with "
                "`mlsm convert --lambda`"
            )
        return cls(dictionary, options)

    def settings(self) -> JsonObject:
        """Lambda, solver and tolerance; ``max_nonzeros`` is part of the format and always None."""
        options = self.options
        return {"lambda": self.lambda_, "solver": options.solver, "tolerance": options.tolerance, "max_nonzeros": None}

    def check(self) -> None:
        """Raise ValueError if an atom is zero, or equals another atom; codes would then not be unique."""
        first_of: dict[bytes, int] = {}
        for index, atom in enumerate(self.dictionary.atoms + 0.0):  # -0.0 becomes 0.0
            if not atom.any():
                raise ValueError(f"atom {index} of the dictionary is all zero; learn or import another dictionary")
            first = first_of.setdefault(atom.tobytes(), index)
            if first != index:
                raise ValueError(
                    f"atoms {first} and {index} of the dictionary are identical, so codes are not unique; learn "
                    "another dictionary, or leave one of them out"
                )

    def inexact(self, coded: SparseCodes) -> InexactCodes | None:
        assert coded.gap is not None
        rows = np.flatnonzero(coded.gap > self.options.tolerance)
        if len(rows) == 0:
            return None
        return InexactCodes(
            rows,
            f"miss --tolerance {self.options.tolerance:g}: the worst relative duality gap is {coded.gap.max():.3g}. "
            "Use --solver auto or a larger --tolerance of `mlsm encode`",
        )

    def why_empty(self, hidden: HiddenStates) -> str:
        """Say that lambda is too large, and which value it must stay below."""
        rows = torch.as_tensor(normalize_rows(hidden)).cpu().numpy()
        atoms = self.dictionary.atoms
        size = max(1, DENSE_ENTRIES // len(atoms))
        parts = (rows[start : start + size] @ atoms.T for start in range(0, len(rows), size))
        largest = max((float(part.max()) for part in parts), default=-np.inf)
        return (
            f"lambda {self.lambda_:g} is too large: the largest correlation of a hidden state with an atom is "
            f"{largest:.4g}, and lambda must be well below it"
        )
