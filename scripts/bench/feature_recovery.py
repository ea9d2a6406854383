"""Compare kinds of coders on hidden states with known true features: which coders find the features?

    python scripts/bench/feature_recovery.py

The hidden states come from ``synthetic_features.py``, as in SynthSAEBench (arXiv 2602.14687). Every coder has the same
number of latents and, on average, the same number of non-zeros in a code. The figures are those of SynthSAEBench, on
held-out rows:

- F1: each latent is a detector of the feature with the most similar direction; the mean over latents.
- MCC: the mean absolute cosine of latents and features, matched one to one (Hungarian algorithm).
- uniqueness: share of the latents' most similar features that are distinct.
- explained variance, L0, and the share of the latents that are in use: as in ``mlsm evaluate dictionary``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from dictionary_learning import learn_with_spams  # another bench in this folder
from scipy.optimize import linear_sum_assignment
from synthetic_features import Recipe, SyntheticFeatures  # another file in this folder

from mlsm_plugin.core.files.atomic_files import write_json
from mlsm_plugin.core.sparse_coding.coder import SparseCoder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary, learn_dictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows, sparse_encode
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.online_learning import mini_batches
from mlsm_plugin.core.sparse_coding.quality import ReconstructionQuality
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sae_training import SaeSettings, SaeTrainer, train_sae

CHUNK = 5000
BATCH = 400
FIGURES = ("f1", "mcc", "uniqueness", "explained_variance", "l0", "frac_alive", "seconds")


@dataclass(frozen=True)
class Problem:
    """The training data of a coder, and the truth, which only the reference may see.

    Attributes:
        truth: the features.
        train: (rows, dim) hidden states.
        latents: number of latents of the coder.
        l0: target for the mean number of non-zeros in a code; a whole number, as TopK needs it.
        seed: for the random numbers of learning.
        args: of the command line.
    """

    truth: SyntheticFeatures
    train: np.ndarray
    latents: int
    l0: int
    seed: int
    args: argparse.Namespace


def cosines(directions: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Absolute cosines (latents, features); 0 for a direction of zeros."""
    return np.abs(normalize_rows(directions.astype(np.float64)) @ normalize_rows(features.astype(np.float64)).T)


def matched_cosine(directions: np.ndarray, features: np.ndarray) -> float:
    """MCC: the mean absolute cosine of the best one-to-one matching; the smaller side is matched completely."""
    similarities = cosines(directions, features)
    return float(similarities[linear_sum_assignment(similarities, maximize=True)].mean())


def uniqueness(directions: np.ndarray, features: np.ndarray) -> float:
    """Number of distinct features that are most similar to a latent, divided by the number of latents."""
    return len(np.unique(cosines(directions, features).argmax(axis=1))) / len(directions)


def detection_f1(
    directions: np.ndarray, features: np.ndarray, codes: sp.csr_matrix, activations: sp.csr_matrix
) -> float:
    """The mean over latents of F1 as a detector of the most similar feature; 0 for a latent that never fires.

    Args:
        directions: (latents, dim).
        features: (features, dim).
        codes: (rows, latents).
        activations: (rows, features), the true activations.
    """
    nearest = cosines(directions, features).argmax(axis=1)
    fires = (codes > 0).astype(np.int64)
    active = (activations > 0).astype(np.int64).tocsc()[:, nearest]
    both = np.asarray(fires.multiply(active).sum(axis=0)).ravel()
    either = np.asarray(fires.sum(axis=0)).ravel() + np.asarray(active.sum(axis=0)).ravel()
    return float((2 * both / np.maximum(either, 1)).mean())


def directions_of(coder: SparseCoder) -> np.ndarray:
    """The directions of the latents (latents, dim): the atoms of a dictionary, or the rows of a decoder."""
    return coder.dictionary.atoms if isinstance(coder, LassoCoder) else coder.sae.weights.decoder.cpu().numpy()


def judged(coder: SparseCoder, truth: SyntheticFeatures, hidden: np.ndarray, activations: sp.csr_matrix) -> dict:
    """The figures of a coder on held-out rows."""
    quality = ReconstructionQuality(coder.num_atoms, coder.dim)
    parts = []
    for start in range(0, len(hidden), CHUNK):
        rows = hidden[start : start + CHUNK]
        parts.append(coder.encode(rows).codes)
        quality.add(rows, parts[-1], coder.reconstruct(rows, parts[-1]))
    codes = sp.vstack(parts, format="csr")
    directions = directions_of(coder)
    figures = quality.result()
    return {
        "f1": detection_f1(directions, truth.vectors, codes, activations),
        "mcc": matched_cosine(directions, truth.vectors),
        "uniqueness": uniqueness(directions, truth.vectors),
        **{name: figures[name] for name in ("explained_variance", "l0", "frac_alive")},
    }


def lambda_with_l0(rows: np.ndarray, atoms: np.ndarray, l0: float) -> float:
    """The lambda for ``l0`` non-zeros per normalized row on average, by bisection; to 1 % if that is possible."""
    low = 1e-4
    high = 1.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        nonzeros = sparse_encode(rows, atoms, lambda_=middle).codes.nnz / len(rows)
        if abs(nonzeros - l0) < 0.01 * l0:
            break
        low, high = (middle, high) if nonzeros > l0 else (low, middle)
    return middle


def as_lasso(problem: Problem, atoms: np.ndarray) -> LassoCoder:
    """The lasso over a dictionary, with the lambda that gives ``problem.l0`` non-zeros."""
    rows = normalize_rows(problem.train[: problem.args.tuning_rows])
    return LassoCoder(AtomDictionary(atoms, {"lambda": lambda_with_l0(rows, atoms, problem.l0)}))


def true_dictionary(problem: Problem) -> SparseCoder:
    """The reference: the directions of the most frequent features."""
    return as_lasso(problem, problem.truth.vectors[: problem.latents].astype(np.float32))


def learned_dictionary(problem: Problem, learn: Callable[..., np.ndarray]) -> SparseCoder:
    """Learn a dictionary twice: for a short time to find lambda, and then with that lambda."""
    rows = normalize_rows(problem.train)
    settings: dict[str, Any] = {
        "num_atoms": problem.latents,
        "batch_size": BATCH,
        "seed": problem.seed,
        "threads": problem.args.threads,
    }
    iterations = problem.args.iterations
    first = learn(rows, lambda_=0.1, iterations=max(1, iterations // 10), **settings)
    lambda_ = lambda_with_l0(rows[: problem.args.tuning_rows], first, problem.l0)
    return as_lasso(problem, learn(rows, lambda_=lambda_, iterations=iterations, **settings))


def trained_sae(problem: Problem, method: str, *, matryoshka: bool = False) -> SparseCoder:
    """A sparse autoencoder; the Matryoshka prefixes are a 32nd, an eighth and a half of the latents."""
    prefixes = tuple(sorted({max(1, problem.latents // part) for part in (32, 8, 2)})) if matryoshka else ()
    settings = SaeSettings(
        problem.latents, problem.l0, problem.args.updates, method, prefixes=prefixes, seed=problem.seed
    )
    trainer = SaeTrainer.begin(settings, torch.from_numpy(problem.train))
    batches = mini_batches(problem.train, BATCH, np.random.default_rng(problem.seed))
    return SaeCoder(train_sae(trainer, map(torch.from_numpy, batches)))


CODERS: dict[str, Callable[[Problem], SparseCoder]] = {
    "lasso, true directions": true_dictionary,
    "lasso, spams.trainDL": lambda problem: learned_dictionary(problem, learn_with_spams),
    "lasso, torch": lambda problem: learned_dictionary(problem, learn_dictionary),
    "TopK SAE": lambda problem: trained_sae(problem, "topk"),
    "BatchTopK SAE": lambda problem: trained_sae(problem, "batchtopk"),
    "Matryoshka BatchTopK SAE": lambda problem: trained_sae(problem, "batchtopk", matryoshka=True),
}


def main() -> None:
    """Learn every kind with every seed, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("--features", 512, "true features"),
        ("--dim", 128, "width of the hidden states"),
        ("--roots", 16, "trees of features; each has 1 + 4 + 16 of them"),
        ("--latents", 256, "latents of each coder"),
        ("--rows", 100_000, "hidden states to learn from"),
        ("--held-out", 20_000, "hidden states to judge on"),
        ("--tuning-rows", 2000, "hidden states to find lambda on"),
        ("--iterations", 300, "mini-batches of 400 for the dictionaries"),
        ("--updates", 2000, "mini-batches of 400 for the sparse autoencoders"),
        ("--seeds", 3, "how many seeds; each draws its own features"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--threads", type=int, help="CPU threads of the dictionaries (default: all cores)")
    parser.add_argument("--l0", type=int, help="non-zeros in a code (default: of as many frequent features)")
    parser.add_argument("--coders", nargs="+", default=list(CODERS), choices=list(CODERS), help="which ones to compare")
    parser.add_argument("--output", help="JSON file for the figures of every seed")
    args = parser.parse_args()
    recipe = replace(Recipe(), features=args.features, dim=args.dim, roots=args.roots)
    print(f"{args.features} features, {args.dim} wide, {args.latents} latents, {args.rows:,} rows, ", end="")
    print(f"{args.seeds} seeds; {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in args.coders}
    for seed in range(1, args.seeds + 1):
        truth = SyntheticFeatures(recipe, seed)
        rng = np.random.default_rng([seed, 1])
        train, _ = truth.sample(args.rows, rng)
        held_out, activations = truth.sample(args.held_out, rng)
        frequent = activations[:, : args.latents].nnz / args.held_out
        print(f"seed {seed}: {activations.nnz / args.held_out:.1f} features in a hidden state, ", end="")
        print(f"{frequent:.1f} of the {args.latents} most frequent ones", flush=True)
        problem = Problem(truth, train, args.latents, args.l0 or max(1, round(frequent)), seed, args)
        for name in args.coders:
            start = time.perf_counter()
            coder = CODERS[name](problem)
            seconds = time.perf_counter() - start
            figures[name].append({**judged(coder, truth, held_out, activations), "seconds": seconds})
            print(
                f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures[name][-1].items()), flush=True
            )
    print_table(figures)
    if args.output:
        write_json(args.output, {"settings": vars(args), "figures": figures})


def print_table(figures: dict[str, list[dict[str, float]]]) -> None:
    """Means over the seeds, with their standard deviations (n - 1)."""
    print("\n| coder | " + " | ".join(FIGURES) + " |\n" + "| --- " * (len(FIGURES) + 1) + "|")
    for name, results in figures.items():
        cells = []
        for key in FIGURES:
            values = np.array([result[key] for result in results])
            deviation = values.std(ddof=1) if len(values) > 1 else 0.0
            digits = 1 if key in ("l0", "seconds") else 3
            cells.append(f"{values.mean():.{digits}f} ± {deviation:.{digits}f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
