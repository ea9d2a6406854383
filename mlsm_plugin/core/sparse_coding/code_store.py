"""The code store: sparse codes of a binarized split in memory-mapped files. This module documents and reads them.

A store is the folder ``<data-bin>/<split>.codes/``:

- ``shard-00000.indptr.npy``, (tokens of the shard + 1,) uint32: the start of each token's row;
- ``shard-00000.atoms.npy``, (non-zeros,) uint16, or uint32 with more than 65,536 atoms: ascending within a row;
- ``shard-00000.weights.npy``, (non-zeros,) float16: each row sums to 1, up to rounding;
- ``shard-00000.gap.json``: the number of coded tokens (``coded_tokens``) and, if the coder certifies its codes, the
  sum and the largest of their duality gaps (``gap_sum``, ``gap_max``);
- ``plan.json``: the plan of the store, by which an interrupted run resumes and a run with another plan fails. It stays
  in the finished store;
- ``meta.json``: the plan and the totals; written last, so a folder without it is incomplete.

A non-zero takes 4 bytes (6 with uint32 atoms), and a token 4 bytes. The files do not depend on when, in how many runs
or by how many processes a store is written. Several processes may write different shards at the same time, and any of
them may seal the store. The order of the keys in ``plan.json`` and ``meta.json`` is part of the format:
:data:`~mlsm_plugin.core.sparse_coding.code_store_writer.META_KEYS`.
:class:`~mlsm_plugin.core.sparse_coding.code_store_writer.CodeStoreWriter` is the only writer.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.files.atomic_files import PathLike, read_json
from mlsm_plugin.core.files.json_checks import (
    JsonObject,
    check_json,
    fields,
    list_of,
    number,
    optional,
    text,
    values,
    whole,
)
from mlsm_plugin.core.files.npy_files import map_npy
from mlsm_plugin.core.files.planned_folder import META_FILE
from mlsm_plugin.core.files.sharded_store import shard_path
from mlsm_plugin.core.sparse_coding.code_store_writer import FORMAT_VERSION, PARTS
from mlsm_plugin.core.sparse_coding.stored_codes import WEIGHT_DTYPE

INFINITE_BITS = np.float16(np.inf).view(np.uint16)
BLOCKS_CHECK = fields({"tokens_per_sample": whole(1), "sample_break_mode": text})
META_CHECK = fields(
    {
        "n_atoms": whole(1, 1 << 31),
        "token_count": whole(),
        "mean_nonzeros": number,
        "coded_tokens": whole(),
        "shards": list_of(fields({"start": whole(), "stop": whole(), "bytes": values(whole())})),
    },
    {
        "layer": whole(0, 10_000),
        "blocks": BLOCKS_CHECK,
        "fingerprints": fields(known={"split": text, "dictionary": text, "auxiliary": text, "alignment": text}),
        "coverage": number,
        "coverage_seed": optional(whole()),
        "dictionary_health": optional(fields(known={"unused_atoms": whole(), "reconstruction_error": number})),
        "lambda": optional(number),
    },
)
# further keys that are needed to train on codes, and to show codes in the text
CORPUS_CHECK = fields({"fingerprints": fields({"split": text, "dictionary": text})})
INSPECTED_CHECK = fields({"blocks": BLOCKS_CHECK})


class CodeStore:
    """Reads one finished store, or several stores as one sequence (``train``, ``train1``, ...).

    Files are mapped when they are first needed, and never read as a whole. A pickled store opens them again by path.
    ValueError if a store is unfinished, damaged or of another format, or the stores differ in the number of atoms.

    Args:
        directories: a store, or several stores in order.
    """

    def __init__(self, directories: PathLike | Iterable[PathLike]) -> None:
        if isinstance(directories, (str, os.PathLike)):
            directories = [directories]
        self.directories = [Path(directory) for directory in directories]
        if not self.directories:
            raise ValueError("no code store was given; pass at least one directory")
        self.metas: list[JsonObject] = [_read_meta(directory) for directory in self.directories]
        self.meta = self.metas[0]
        self.num_atoms: int = self.meta["n_atoms"]
        self._shards: list[tuple[Path, int]] = []
        lengths = []
        for directory, meta in zip(self.directories, self.metas, strict=True):
            if meta["n_atoms"] != self.num_atoms:
                raise ValueError(
                    f"{directory} has codes over {meta['n_atoms']} atoms but {self.directories[0]} over "
                    f"{self.num_atoms}; encode both with the same dictionary"
                )
            for index, shard in enumerate(meta["shards"]):
                self._shards.append((directory, index))
                lengths.append(shard["stop"] - shard["start"])
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # (n_shards + 1,)
        self.num_tokens = int(self._starts[-1])
        self._maps: dict[int, dict[str, np.ndarray]] = {}

    def __len__(self) -> int:
        return self.num_tokens

    def __getstate__(self) -> JsonObject:
        return {**self.__dict__, "_maps": {}}

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The codes of tokens at flat ``positions`` (n,) int, in any order, possibly repeated; -1 gives an empty row.

        Returns atoms (n, m) int32 padded with -1, and weights (n, m) float16 padded with 0; m is the length of the
        longest row (0 if all are empty). ValueError if ``positions`` is not a 1-D int array, a position lies outside
        the store, or codes are damaged.
        """
        positions = np.asarray(positions)
        if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
            raise ValueError(f"positions must be a 1-D int array, got {positions.dtype} of shape {positions.shape}")
        positions = positions.astype(np.int64)
        if positions.size and not (positions.min() >= -1 and positions.max() < self.num_tokens):
            wrong = positions[(positions < -1) | (positions >= self.num_tokens)][0]
            raise ValueError(f"position {wrong} is outside the store; it must be -1 or 0 to {self.num_tokens - 1}")

        shard_of = np.searchsorted(self._starts, positions, side="right") - 1  # -1 for position -1
        begins = np.zeros_like(positions)
        lengths = np.zeros_like(positions)
        members = {int(shard): np.flatnonzero(shard_of == shard) for shard in np.unique(shard_of) if shard >= 0}
        for shard, rows in members.items():
            maps = self._map(shard)
            local = positions[rows] - self._starts[shard]
            begins[rows] = maps["indptr"][local]
            ends = maps["indptr"][local + 1].astype(np.int64)
            lengths[rows] = ends - begins[rows]
            self._check(shard, bool((lengths[rows] >= 0).all() and (ends <= len(maps["atoms"])).all()))

        longest = int(lengths.max(initial=0))
        atoms = np.full((len(positions), longest), -1, dtype=np.int32)
        weights = np.zeros((len(positions), longest), dtype=WEIGHT_DTYPE)
        for shard, rows in members.items():
            count = lengths[rows]
            columns = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            sources = np.repeat(begins[rows], count) + columns
            target = (np.repeat(rows, count), columns)
            shard_atoms = self._map(shard)["atoms"][sources]
            shard_weights = self._map(shard)["weights"][sources]
            if len(shard_atoms):
                # read as integers, negative weights, infinity and NaN are above all other weights
                finite = shard_weights.view(np.uint16).max() < INFINITE_BITS
                self._check(shard, bool(finite and shard_atoms.max() < self.num_atoms))
            atoms[target] = shard_atoms
            weights[target] = shard_weights
        return atoms, weights

    def rows(self, start: int, stop: int) -> sp.csr_matrix:
        """The codes of the tokens ``start`` to ``stop - 1``, (stop - start, n_atoms) float32.

        ValueError if the range is not within the store, or codes are damaged.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(
                f"rows {start} to {stop} are outside the store; they must be within 0 to {self.num_tokens}"
            )
        atoms, weights = self.lookup(np.arange(start, stop))
        filled = atoms >= 0
        indptr = np.concatenate([[0], np.cumsum(filled.sum(axis=1))])
        return sp.csr_matrix(
            (weights[filled].astype(np.float32), atoms[filled], indptr), shape=(stop - start, self.num_atoms)
        )

    def _check(self, shard: int, good: bool) -> None:
        if not good:
            directory, index = self._shards[shard]
            raise ValueError(
                f"shard {index} of {directory} is damaged: it has atoms or weights that no coder writes; delete its "
                "files and run `mlsm encode` again"
            )

    def _map(self, shard: int) -> dict[str, np.ndarray]:
        if shard not in self._maps:
            directory, index = self._shards[shard]
            self._maps[shard] = {part: map_npy(shard_path(directory, index, part), ndim=1) for part in PARTS}
        return self._maps[shard]


def is_code_store(folder: Path) -> bool:
    """Whether a finished folder of this package holds codes, and not a dictionary."""
    return any(folder.glob("shard-*.indptr.npy"))


def _read_meta(directory: Path) -> JsonObject:
    """Read ``meta.json``, and compare the sizes in it with the files; ValueError if they differ."""
    if not (directory / META_FILE).is_file():
        raise ValueError(f"{directory} holds no {META_FILE}: it is not a finished code store; run `mlsm encode`")
    meta = read_json(directory / META_FILE)
    version = meta.get("format_version") if isinstance(meta, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{directory} has the format version {version}, and this version reads {FORMAT_VERSION}; "
            "run `mlsm encode` again"
        )
    check_json(meta, META_CHECK, directory / META_FILE)
    for index, shard in enumerate(meta["shards"]):
        for part, expected in shard["bytes"].items():
            path = shard_path(directory, index, part)
            size = path.stat().st_size if path.exists() else 0
            if size != expected:
                raise ValueError(f"{path} has {size} bytes instead of {expected}; run `mlsm encode` again")
    return meta
