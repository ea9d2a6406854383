"""The dictionary of latent semantic properties: learn, save and load it.

Only this file decides the orientation: a dictionary is (n_atoms, dim), and each row is an atom of unit L2 norm.
"""

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from mlsm_plugin.core.files.atomic_files import PathLike, read_json, write_json, write_npy
from mlsm_plugin.core.files.json_checks import JsonObject, check_json, fields, number, optional, text, whole
from mlsm_plugin.core.files.npy_files import read_npy
from mlsm_plugin.core.files.planned_folder import META_FILE
from mlsm_plugin.core.sparse_coding.encode import as_array, check_finite, check_settings, normalize_rows
from mlsm_plugin.core.sparse_coding.online_learning import learn_online, mini_batches
from mlsm_plugin.core.sparse_coding.spams_backend import BATCHES_PER_CALL, learn_with_spams
from mlsm_plugin.core.sparse_coding.sparse_coder import HiddenStates

ATOMS_FILE = "dictionary.npy"
META_CHECK = fields(
    known={
        "kind": text,
        "n_atoms": whole(1),
        "dim": whole(1),
        "layer": optional(whole(0, 10_000)),
        "lambda": optional(number),
        "auxiliary_fingerprint": optional(text),
        "auxiliary": optional(text),
        "text": optional(text),
        "blocks": optional(fields({"tokens_per_sample": whole(1), "sample_break_mode": text})),
        "health": optional(fields(known={"unused_atoms": whole(), "reconstruction_error": number})),
    }
)
KIND = "lasso"  # kind of the coder in ``meta.json``; files of version 0.1 do not have it
# float32 atoms have unit norm up to about 1e-7, and atoms stored in half precision up to 1e-3
UNIT_NORM_TOLERANCE = 1e-3
BACKENDS = ("torch", "spams")


@dataclass(eq=False)
class AtomDictionary:
    """A dictionary and its origin; on disk, a folder with ``dictionary.npy`` and ``meta.json``.

    ValueError if the atoms are not 2-D, not finite or not of unit norm, or ``meta`` has another shape.
    """

    atoms: np.ndarray  # (n_atoms, dim) float32 in C order, unit rows
    meta: JsonObject = field(default_factory=dict)  # JSON values; kind, n_atoms and dim are added

    def __post_init__(self) -> None:
        self.atoms = np.ascontiguousarray(self.atoms, dtype=np.float32)
        if self.atoms.ndim != 2 or self.atoms.size == 0:
            raise ValueError(f"a dictionary must be 2-D (n_atoms, dim) and not empty, got the shape {self.atoms.shape}")
        check_finite(self.atoms, "atom")
        norms = np.linalg.norm(self.atoms, axis=1)
        worst = int(np.abs(norms - 1).argmax())
        if abs(norms[worst] - 1) > UNIT_NORM_TOLERANCE:
            raise ValueError(f"atom {worst} has the norm {norms[worst]:.4g}; every atom (row) must have the norm 1")
        for name, size in zip(("n_atoms", "dim"), self.atoms.shape, strict=True):
            if self.meta.get(name, size) != size:
                raise ValueError(f"{META_FILE} says {name} {self.meta[name]} but {ATOMS_FILE} has {size}")
        if self.meta.get("kind", KIND) != KIND:
            raise ValueError(f"{META_FILE} says that this is a coder of kind {self.meta['kind']!r}, not a dictionary")
        self.meta = {"kind": KIND, **self.meta, "n_atoms": self.atoms.shape[0], "dim": self.atoms.shape[1]}

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of ``dictionary.npy`` as :meth:`save` writes it."""
        buffer = io.BytesIO()
        np.save(buffer, self.atoms, allow_pickle=False)
        return hashlib.sha256(buffer.getbuffer()).hexdigest()

    def save(self, directory: PathLike) -> None:
        """Write the folder; ``meta.json`` is written last, so a folder without it is incomplete."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / META_FILE).unlink(missing_ok=True)
        write_npy(directory / ATOMS_FILE, self.atoms)
        write_json(directory / META_FILE, self.meta)

    @classmethod
    def load(cls, directory: PathLike) -> "AtomDictionary":
        """Load a folder that :meth:`save` wrote; ValueError, with the folder, if it is damaged or not a dictionary."""
        directory = Path(directory)
        for name in (ATOMS_FILE, META_FILE):
            if not (directory / name).is_file():
                raise ValueError(f"{directory} holds no {name}; make the dictionary with `mlsm dictionary`")
        meta = check_json(read_json(directory / META_FILE), META_CHECK, directory / META_FILE)
        try:
            return cls(read_npy(directory / ATOMS_FILE), meta)
        except ValueError as error:
            raise ValueError(f"{directory} is not a valid dictionary: {error}") from None


def learn_dictionary(
    hidden: HiddenStates,
    *,
    num_atoms: int,
    lambda_: float,
    iterations: int,
    batch_size: int,
    threads: int | None = None,
    seed: int = 0,
    backend: str = "torch",
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Learn the atoms that code ``hidden`` best: (num_atoms, dim) float32, unit rows.

    Minimizes ``sum_i 0.5 * ||x_i - a_i D||^2 + lambda_ * sum(a_i)`` over a_i >= 0 and atoms of norm <= 1 by online
    dictionary learning (Mairal et al., 2009), starting from distinct rows of ``hidden`` drawn with ``seed``. The same
    seed and number of threads give the same bytes; another number of threads changes the order of sums. ValueError if
    ``hidden`` is not 2-D or not finite, has fewer distinct directions than ``num_atoms``, or a setting is out of range.

    Args:
        hidden: (n_tokens, dim) numpy array or torch tensor, rows normalized by the caller
            (:func:`~mlsm_plugin.core.sparse_coding.encode.normalize_rows`). A float32 array in C order is not copied.
        lambda_: weight of the L1 penalty, > 0.
        iterations, batch_size: number of mini-batches to learn from, and rows in each.
        threads: CPU threads, None for all cores.
        seed: seed of the initial dictionary and of the order of the rows.
        backend: ``"torch"`` (:func:`~mlsm_plugin.core.sparse_coding.online_learning.learn_online`) or ``"spams"``
            (``spams.trainDL``).
        device: torch device; ``"spams"`` ignores it.
    """
    check_settings(lambda_)
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    counts = {"num_atoms": num_atoms, "iterations": iterations, "batch_size": batch_size, "threads": threads}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    hidden = np.ascontiguousarray(as_array(hidden), dtype=np.float32)
    if hidden.ndim != 2:
        raise ValueError(f"hidden must be 2-D (n_tokens, dim), got the shape {hidden.shape}")
    check_finite(hidden, "hidden row")
    rng = np.random.default_rng(seed)
    initial = sample_distinct_rows(hidden, num_atoms, rng)
    if backend == "torch":
        learned = learn_online(
            hidden,
            initial,
            rng,
            lambda_=lambda_,
            iterations=iterations,
            batch_size=batch_size,
            threads=threads,
            device=device,
        )
    else:
        learned = learn_with_spams(
            mini_batches(hidden, batch_size * BATCHES_PER_CALL, rng),
            initial,
            lambda_=lambda_,
            iterations=iterations,
            batch_size=min(batch_size, len(hidden)),
            threads=threads,
        )
    vanished = ~(np.linalg.norm(learned, axis=1) > np.finfo(np.float32).eps)
    return np.ascontiguousarray(normalize_rows(np.where(vanished[:, None], initial, learned)))


def sample_distinct_rows(hidden: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ``count`` rows of distinct directions from (n_tokens, dim) float32, scaled to unit norm.

    ValueError if there are fewer than ``count`` distinct directions.
    """
    order = rng.permutation(len(hidden))
    candidates = count  # doubled while they have too few directions, which avoids sorting a large sample
    while True:
        rows = normalize_rows(hidden[order[:candidates]])
        rows = rows[rows.any(axis=1)]
        _, first = np.unique(rows, axis=0, return_index=True)
        if len(first) >= count:
            return rows[np.sort(first)[:count]]
        if candidates >= len(hidden):
            raise ValueError(
                f"num_atoms is {count} but hidden has only {len(first)} distinct non-zero rows; "
                "sample more tokens or ask for fewer atoms"
            )
        candidates *= 2
