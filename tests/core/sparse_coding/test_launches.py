"""What a GPU would be given: how many operations torch starts, and how often it waits for a result, counted on the CPU.

An operation costs a GPU about as long as the whole arithmetic of a mini-batch, and a result that the program looks at
makes it wait for all before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mlsm_plugin.core.sparse_coding.active_set_torch import solve_batched
from mlsm_plugin.core.sparse_coding.online_learning import ATOMS_PER_BLOCK, Surrogate

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2")


class Launches(TorchDispatchMode):
    """Counts operations that are more than another view of the same numbers, and results that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        looks_for_rows = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        self.operations += not func.is_view
        self.waits += name in WAITING or looks_for_rows
        return func(*args, **(kwargs or {}))


def mixtures(rows: int, atoms: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows (float64) that are mixtures of unit atoms, which share a direction."""
    rng = np.random.default_rng(0)
    dictionary = 0.8 * rng.standard_normal(dim) + rng.standard_normal((atoms, dim))
    dictionary /= np.linalg.norm(dictionary, axis=1, keepdims=True)
    chosen = dictionary[rng.integers(atoms, size=(rows, 6))]
    hidden = (rng.exponential(size=(rows, 6, 1)) * chosen).sum(axis=1) + 0.1 * rng.standard_normal((rows, dim))
    return hidden / np.linalg.norm(hidden, axis=1, keepdims=True), dictionary


def test_a_batch_of_codes_takes_few_operations_and_waits() -> None:
    hidden, atoms = mixtures(200, 400, 64)
    solve_batched(torch.tensor(hidden[:2]), atoms, 0.02)  # prepares the dictionary
    with Launches() as counted:
        _, gap = solve_batched(torch.tensor(hidden), atoms, 0.02)
    assert gap.max() < 1e-8
    assert counted.operations < 3000  # once 3,630
    assert counted.waits < 130  # once 194


def test_an_update_of_the_dictionary_takes_a_few_operations_for_a_block_of_atoms() -> None:
    rng = np.random.default_rng(1)
    hidden, atoms = mixtures(600, 5 * ATOMS_PER_BLOCK, 16)
    surrogate, dictionary = Surrogate(torch.tensor(atoms)), torch.tensor(atoms)
    surrogate.add(
        hidden, sp.csr_matrix(rng.exponential(size=(600, len(atoms))) * (rng.random((600, len(atoms))) < 0.1))
    )
    with Launches() as counted:
        surrogate.improve(dictionary)
    assert counted.operations < 150  # once 2,935, nine for each atom
