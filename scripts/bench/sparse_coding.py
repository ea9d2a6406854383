"""Measure speed and exactness of the sparse coders, all in one run.

    python scripts/bench/sparse_coding.py [--hidden HIDDEN.npy --dictionary DICTIONARY.npy]

The peers, each on the same unit-norm rows:

- ``active_set``: this project's solver, with its certified gap;
- ``spams float64``, ``spams float32``: ``spams.lasso`` alone, without a gap;
- ``FISTA-100``: the published recipe of MLSM, 100 steps of FISTA from zero in float32;
- ``FISTA to the gap``: as many steps as are needed to certify the gap of ``active_set`` (float64, on fewer rows).

They run in turn, ``--rounds`` times; the medians are compared. The distance is the largest L1 distance of a target
distribution from the exact one (from ``spams float64``, without rows that have no small gap), at most 2. With
``--device cuda``, ``active_set`` and FISTA run on the GPU.

Without files the rows are synthetic: mixtures of atoms that share a direction, as hidden states do.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp
import torch

from mlsm_plugin.core.sparse_coding.active_set_torch import relative_gap_of_parts
from mlsm_plugin.core.sparse_coding.encode import normalize_rows, sparse_encode, target_distribution

FISTA_STEPS = 100
FISTA_ROWS = 1024


@dataclass
class Peer:
    """A coder, the number of its rows, and its results."""

    name: str
    code: Callable[[np.ndarray], sp.csr_matrix]
    rows: int
    seconds: list[float] = field(default_factory=list)
    codes: sp.csr_matrix | None = None

    @property
    def speed(self) -> float:
        """Tokens per second: the median of the rounds."""
        return self.rows / statistics.median(self.seconds)


def published_fista(
    hidden: np.ndarray, dictionary: np.ndarray, lambda_: float, *, steps: int, device: str
) -> sp.csr_matrix:
    """``steps`` steps of FISTA (Beck and Teboulle, 2009) from zero, float32: (n_tokens, n_atoms)."""
    atoms = torch.tensor(dictionary, dtype=torch.float32, device=device)
    lipschitz = float(torch.linalg.matrix_norm(atoms.double(), ord=2)) ** 2
    parts = []
    for start in range(0, len(hidden), FISTA_ROWS):
        x = torch.tensor(hidden[start : start + FISTA_ROWS], dtype=torch.float32, device=device)
        a = y = torch.zeros(len(x), len(atoms), device=device)
        t = 1.0
        for _ in range(steps):
            new_a = (y + ((x - y @ atoms) @ atoms.T - lambda_) / lipschitz).clip(min=0)
            new_t = (1 + (1 + 4 * t * t) ** 0.5) / 2
            y = new_a + (t - 1) / new_t * (new_a - a)
            a = new_a
            t = new_t
        parts.append(sp.csr_matrix(a.cpu().numpy()))
    return sp.vstack(parts, format="csr")


def fista_to_the_gap(
    hidden: np.ndarray, dictionary: np.ndarray, lambda_: float, *, gap: float, device: str
) -> sp.csr_matrix:
    """FISTA in float64 until each row's certified gap is small, at most 10,000 steps: (n_tokens, n_atoms).

    The momentum of a row is reset when it points uphill (O'Donoghue and Candes, 2015).
    """
    atoms, x = (torch.tensor(each, dtype=torch.float64, device=device) for each in (dictionary, hidden))
    lipschitz = float(torch.linalg.matrix_norm(atoms, ord=2)) ** 2
    finished = torch.zeros(len(x), len(atoms), dtype=x.dtype, device=device)
    active = torch.arange(len(x), device=device)
    a = y = torch.zeros_like(finished)
    t = torch.ones(len(x), 1, dtype=x.dtype, device=device)
    for step in range(10_000):
        if step % 10 == 0:  # the gap costs as much as a step
            residual = x - a @ atoms
            largest = (residual @ atoms.T).amax(dim=1)
            penalty = lambda_ * a.sum(dim=1)
            done = relative_gap_of_parts(x, residual, largest, penalty, lambda_) <= gap
            finished[active[done]] = a[done]
            active, x, a, y, t = (tensor[~done] for tensor in (active, x, a, y, t))
            if len(active) == 0:
                break
        new_a = (y - ((y @ atoms - x) @ atoms.T + lambda_) / lipschitz).clip(min=0)
        uphill = ((y - new_a) * (new_a - a)).sum(dim=1, keepdim=True) > 0
        t = torch.where(uphill, torch.ones_like(t), t)
        new_t = (1 + torch.sqrt(1 + 4 * t**2)) / 2
        y = new_a + (t - 1) / new_t * (new_a - a)
        a = new_a
        t = new_t
    finished[active] = a
    return sp.csr_matrix(finished.cpu().numpy())


def lars(hidden: np.ndarray, dictionary: np.ndarray, lambda_: float, dtype: type) -> sp.csr_matrix:
    """``spams.lasso``: (n_tokens, n_atoms)."""
    import spams

    codes = spams.lasso(
        np.asfortranarray(hidden.T, dtype), D=np.asfortranarray(dictionary.T, dtype), lambda1=lambda_, mode=2, pos=True
    )
    return codes.T.tocsr()


def relative_gaps(hidden: np.ndarray, dictionary: np.ndarray, codes: sp.csr_matrix, lambda_: float) -> np.ndarray:
    """The relative duality gap of each code, (n_tokens,), computed for a bounded number of rows at a time."""
    gaps = np.empty(len(hidden))
    for start in range(0, len(hidden), 1024):
        rows = slice(start, start + 1024)
        part = codes[rows].astype(np.float64)
        residual = hidden[rows] - part @ dictionary
        largest = (residual @ dictionary.T).max(axis=1)
        penalty = lambda_ * np.asarray(part.sum(axis=1)).ravel()
        gaps[rows] = relative_gap_of_parts(hidden[rows], residual, largest, penalty, lambda_)
    return gaps


def synthetic(rows: int, n_atoms: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows that are sparse mixtures of unit atoms with a common component, plus noise."""
    rng = np.random.default_rng(0)
    atoms = normalize_rows(0.8 * rng.standard_normal(dim) + rng.standard_normal((n_atoms, dim)))
    chosen = rng.integers(n_atoms, size=(rows, 20))
    mixtures = np.einsum("rk,rkd->rd", rng.exponential(size=chosen.shape), atoms[chosen])
    return normalize_rows(mixtures + 0.3 * rng.standard_normal((rows, dim))), atoms


def largest_distance(codes: sp.csr_matrix, exact: sp.csr_matrix) -> float:
    """The largest L1 distance between target distributions of the two codes, over their common first rows."""
    exact = exact[: codes.shape[0]]
    return float(abs(target_distribution(codes) - target_distribution(exact)).sum(axis=1).max())


def main() -> None:
    """Run the peers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", help="npy of hidden states (n_tokens, dim); they are divided by their norms")
    parser.add_argument("--dictionary", help="npy of atoms (n_atoms, dim), unit rows")
    parser.add_argument("--lambda", dest="lambda_", type=float, default=0.05)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of active_set, spams and FISTA-100")
    parser.add_argument("--gap-rows", type=int, default=256, help="rows of FISTA to the gap")
    parser.add_argument("--gap", type=float, default=1e-6, help="relative duality gap that FISTA has to reach")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.hidden and args.dictionary:
        hidden = normalize_rows(np.load(args.hidden)[: args.rows].astype(np.float64))
        atoms = np.load(args.dictionary).astype(np.float64)
    else:
        hidden, atoms = synthetic(args.rows, 3000, 384)
    lambda_ = args.lambda_
    device = args.device

    def ours(rows: np.ndarray) -> sp.csr_matrix:
        on_device = torch.from_numpy(rows).to(device)
        return sparse_encode(on_device, atoms, lambda_=lambda_).codes

    ours(hidden[:64])  # compile and prepare before the clock starts
    peers = [
        Peer("active_set", ours, len(hidden)),
        Peer("spams float64", lambda rows: lars(rows, atoms, lambda_, np.float64), len(hidden)),
        Peer("spams float32", lambda rows: lars(rows, atoms, lambda_, np.float32), len(hidden)),
        Peer(
            f"FISTA-{FISTA_STEPS}",
            lambda rows: published_fista(rows, atoms, lambda_, steps=FISTA_STEPS, device=device),
            len(hidden),
        ),
        Peer(
            "FISTA to the gap",
            lambda rows: fista_to_the_gap(rows, atoms, lambda_, gap=args.gap, device=device),
            min(args.gap_rows, len(hidden)),
        ),
    ]
    for number in range(args.rounds):
        for peer in peers:
            start = time.perf_counter()
            peer.codes = peer.code(hidden[: peer.rows])
            peer.seconds.append(time.perf_counter() - start)
            print(f"round {number + 1}: {peer.name} {peer.rows / peer.seconds[-1]:,.0f} tokens/s", flush=True)
    report(peers, hidden, atoms, lambda_, device)


def report(peers: list[Peer], hidden: np.ndarray, atoms: np.ndarray, lambda_: float, device: str) -> None:
    """Print speed, exactness and ratios."""
    exact = lars(hidden, atoms, lambda_, np.float64)
    loose = np.flatnonzero(relative_gaps(hidden, atoms, exact, lambda_) > 1e-6)
    rows = len(hidden)
    n_atoms = len(atoms)
    print(f"{rows} rows, {hidden.shape[1]} wide, {n_atoms} atoms, lambda {lambda_}, {exact.nnz / rows:.1f} non-zeros")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {device}, torch {torch.__version__}")
    if len(loose):
        print(f"{len(loose)} rows without an exact reference are left out of the distances")
    print(f"{'peer':18} {'rows':>6} {'tokens/s':>9} {'active_set is':>14} {'largest L1':>11} {'largest gap':>12}")
    for peer in peers:
        assert peer.codes is not None
        kept = np.setdiff1d(np.arange(peer.rows), loose)
        gap = relative_gaps(hidden[kept], atoms, peer.codes[kept], lambda_).max()
        distance = largest_distance(peer.codes[kept], exact[kept])
        ratio = peers[0].speed / peer.speed
        print(f"{peer.name:18} {peer.rows:6} {peer.speed:9.0f} {ratio:13.2f}x {distance:11.2g} {gap:12.2g}", flush=True)


if __name__ == "__main__":
    main()
