"""Online dictionary learning in torch, on any device (Mairal, Bach, Ponce and Sapiro, ICML 2009)."""

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.sparse_coding.encode import normalize_rows, sparse_encode

ATOMS_PER_BLOCK = 64  # number of atoms that are updated with one matrix product
# Largest exponent rho of forgetting earlier codes. On hidden states of a pre-trained model (512 atoms, 384 wide, 400
# mini-batches of 400), the held-out objective was 0.1671 without forgetting, 0.1617 with rho 3, 0.1610 with 5, and
# 0.1602 with 10 and with 20.
MOST_FORGETTING = 10.0
USES_TO_KEEP = 100
# An atom that no code has used for UNUSED_ROWS_PER_ATOM * n_atoms rows is replaced. This is early enough to learn the
# new atom, and late enough to keep rare atoms.
UNUSED_ROWS_PER_ATOM = 10
EQUAL = 1e-6  # a row can become an atom if its cosine with every atom is below 1 - EQUAL


class Surrogate:
    """The sums that online learning keeps: ``A = sum w a a^T`` and ``B = sum w a x`` (Mairal et al., 2009, eq. 8).

    The weights ``w`` of later mini-batches are larger, since earlier codes use worse dictionaries. At the ``t``-th
    update the past is weighted by ``(1 - 1 / t)^rho`` (Mairal et al., JMLR 2010, sec. 3.4.2), so about the last
    ``t / (rho + 1)`` mini-batches count. ``rho`` grows with the number of codes, from 1 to ``MOST_FORGETTING``, such
    that the mini-batches that count use an atom ``USES_TO_KEEP`` times on average. Instead of shrinking the past, the
    weight of the present grows. The sums have the dtype and device of ``atoms`` (n_atoms, dim), the first dictionary.
    """

    def __init__(self, atoms: Tensor) -> None:
        self.a = atoms.new_zeros(len(atoms), len(atoms))
        self.b = torch.zeros_like(atoms)
        self.dense = atoms.device.type != "cpu"  # on a GPU, dense products are faster
        self.weight = 1.0
        self.updates = 0
        self.uses = 0.0  # mean number of uses of an atom

    def add(self, rows: np.ndarray, codes: sp.csr_matrix) -> None:
        """Add a mini-batch of hidden states ``rows`` (b, dim) and their codes (b, n_atoms)."""
        self.updates += 1
        self.uses += codes.nnz / codes.shape[1]
        if self.updates > 1:
            rho = min(max(self.uses / USES_TO_KEEP - 1, 1.0), MOST_FORGETTING)
            self.weight /= (1 - 1 / self.updates) ** rho
        codes = codes.astype(np.float64)
        weight = self.weight / len(rows)
        if self.dense:
            dense = torch.from_numpy(codes.toarray()).to(self.a)
            self.a.addmm_(dense.T, dense, alpha=weight)
            self.b.addmm_(dense.T, torch.from_numpy(rows).to(self.b), alpha=weight)
            return
        products = (codes.T @ codes).tocoo()
        index = torch.from_numpy(np.stack([products.row, products.col]).astype(np.int64)).to(self.a.device)
        values = torch.from_numpy(products.data * weight).to(self.a)
        self.a.index_put_((index[0], index[1]), values, accumulate=True)
        moments = codes.T @ rows.astype(np.float64) * weight
        self.b += torch.from_numpy(np.ascontiguousarray(moments)).to(self.b)

    def forget(self, atoms: Tensor) -> None:
        """Delete the sums of the atoms with these indices."""
        self.a[atoms] = 0
        self.a[:, atoms] = 0
        self.b[atoms] = 0

    def improve(self, dictionary: Tensor) -> None:
        """Update the atoms in place by one pass of block coordinate descent (Mairal et al., 2009, algorithm 2).

        Each atom moves to its minimizer given all others, and is then projected onto the unit ball. The new atoms of a
        block are linear combinations of its old atoms and of their minimizers. The coefficients depend only on the
        inner products of these vectors. They are computed on the CPU, so a GPU gets a few products per block, not per
        atom.
        """
        diagonal = self.a.diagonal()
        all_used = torch.nonzero(diagonal > 0).squeeze(1)
        for used in all_used.split(ATOMS_PER_BLOCK):
            sums = self.a[used]
            scales = diagonal[used]
            old = dictionary[used]
            minimizers = (self.b[used] - sums @ dictionary) / scales[:, None] + old
            vectors = torch.cat([minimizers, old])  # (2m, dim)
            changes = sums[:, used] / scales[:, None]  # row j: how changes of the others change the minimizer of j
            products = (vectors @ vectors.T).cpu().numpy()
            coefficients = torch.from_numpy(_in_turn(changes.cpu().numpy(), products)).to(vectors)
            new = coefficients @ vectors
            dictionary[used] = new / torch.linalg.vector_norm(new, dim=1, keepdim=True).clip(min=1.0)


def _in_turn(changes: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Coefficients (m, 2m) of the new atoms of a block, computed in order, each from the earlier ones.

    A row of ``changes`` (m, m) says how much of the other atoms' changes to subtract from its minimizer. ``products``
    (2m, 2m) are the inner products of the minimizers and the old atoms.
    """
    number = len(changes)
    new = np.eye(number, 2 * number)
    moved = np.zeros_like(new)  # new minus old
    for j in range(number):
        new[j] -= changes[j, :j] @ moved[:j]
        new[j] /= max(1.0, max(new[j] @ products @ new[j], 0.0) ** 0.5)
        moved[j] = new[j]
        moved[j, number + j] -= 1
    return new


def learn_online(
    hidden: np.ndarray,
    initial: np.ndarray,
    rng: np.random.Generator,
    *,
    lambda_: float,
    iterations: int,
    batch_size: int,
    threads: int | None = None,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Learn a dictionary by online dictionary learning with this package's solver.

    Alternates between coding a mini-batch over the current dictionary and one pass of block coordinate descent on the
    surrogate ``0.5 tr(D^T A D) - tr(D^T B)``. Atoms that stay unused are replaced by distinct random rows of the
    current mini-batch. Settings are those of
    :func:`~mlsm_plugin.core.sparse_coding.dictionary.learn_dictionary`.

    ``hidden`` is (n_tokens, dim) float32, finite, and ``initial`` the first dictionary, (n_atoms, dim), unit rows.
    ``rng`` decides the order of the rows and the replacements. The result is (n_atoms, dim) float32, norms at most 1.
    """
    dictionary = torch.tensor(initial, dtype=torch.float64, device=device)
    surrogate = Surrogate(dictionary)
    last_use = np.zeros(len(initial), np.int64)  # number of rows seen when each atom was last used
    seen = 0
    batches = mini_batches(hidden, batch_size, rng)
    for _ in Progress(range(iterations), desc="learning the dictionary", unit="batch"):
        rows = next(batches)
        seen += len(rows)
        on_device = torch.from_numpy(rows).to(device)
        codes = sparse_encode(on_device, dictionary, lambda_=lambda_, threads=threads).codes
        last_use[np.unique(codes.indices)] = seen
        surrogate.add(rows, codes)
        surrogate.improve(dictionary)
        unused = np.flatnonzero(seen - last_use > UNUSED_ROWS_PER_ATOM * len(initial))
        if len(unused):
            new = new_directions(rows, dictionary)
            unused = unused[: len(new)]
            index = torch.from_numpy(unused).to(device)
            dictionary[index] = new[rng.choice(len(new), len(unused), replace=False)]
            surrogate.forget(index)
            last_use[unused] = seen
    return dictionary.float().cpu().numpy()


def new_directions(rows: np.ndarray, atoms: Tensor) -> Tensor:
    """Distinct rows of unit norm that equal no atom, since codes over two equal atoms would not be unique."""
    distinct = normalize_rows(np.unique(rows, axis=0).astype(np.float64))
    directions = torch.from_numpy(distinct[distinct.any(axis=1)]).to(atoms)
    return directions[(directions @ atoms.T).amax(dim=1) < 1 - EQUAL]


def mini_batches(hidden: np.ndarray, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless mini-batches of rows in random order, pass after pass."""
    batch_size = min(batch_size, len(hidden))
    while True:
        order = rng.permutation(len(hidden))
        for start in range(0, len(hidden) - batch_size + 1, batch_size):
            yield hidden[np.sort(order[start : start + batch_size])]
