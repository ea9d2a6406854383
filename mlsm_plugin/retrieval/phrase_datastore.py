"""A phrase datastore, opened and searched by similarity (Min et al., 2022).

A datastore is a folder:

- ``tokens.npy``, (num_tokens,) int32: the text; ``block_starts.npy``, int64: where its blocks begin; ``dict.txt``;
- ``shard-00000.keys.npy``, (n, dim) float16 or float32: hidden states of tokens of a contiguous range of the text;
- ``shard-00000.positions.npy``, (n,) int64: the positions of these tokens in the text, ascending;
- ``plan.json``: the plan, by which an interrupted build resumes and a build with another plan fails; it is kept;
- ``meta.json``: the plan, the number of keys, and a hash of each file; written last, so a folder without it is
  incomplete;
- ``index.faiss`` and ``index.json``, if there is an index (:mod:`~mlsm_plugin.retrieval.key_index`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, read_json, sampled_sha256
from mlsm_plugin.core.files.json_checks import check_json, fields, list_of, text, whole
from mlsm_plugin.core.files.npy_files import map_npy, npy_header
from mlsm_plugin.core.files.output_lock import in_turn
from mlsm_plugin.core.files.planned_folder import META_FILE, PLAN_FILE
from mlsm_plugin.core.files.sharded_store import shard_path
from mlsm_plugin.core.losses.span_contrastive import similarities
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from mlsm_plugin.retrieval.datastore_builder import (
    BLOCKS_FILE,
    CHUNK_ENTRIES,
    FORMAT,
    HASHES,
    TOKENS_FILE,
    DatastoreBuilder,
)
from mlsm_plugin.retrieval.key_index import KeyIndex, training_size
from mlsm_plugin.retrieval.settings import DatastoreSettings

CHUNK_ENTRIES_GPU = 1 << 24  # entries of keys that a GPU search reads at once
SCORES_AT_ONCE = 1 << 16  # scores of a query that are collected before the best are selected
META_CHECK = fields(
    {
        "num_tokens": whole(),
        "num_keys": whole(),
        "dim": whole(1, 1 << 20),
        "similarity": text,
        "shard_keys": list_of(whole()),
    },
    {"fingerprints": fields({"checkpoint": text}), HASHES: fields()},
)


class PhraseDatastore:
    """A complete datastore, opened for searching; its keys stay on disk.

    ``meta`` is the content of ``meta.json``; ``tokens`` ``(num_tokens,)`` are the memory-mapped ids of the text, and
    ``block_starts`` the ascending positions where its blocks begin. ``index`` is None if all keys are compared.
    """

    def __init__(self, directory: PathLike) -> None:
        """Open the datastore; FileNotFoundError if it does not exist, ValueError if it is incomplete or damaged."""
        self.directory = Path(directory)
        if not (self.directory / META_FILE).is_file():
            if (self.directory / PLAN_FILE).is_file():
                raise ValueError(f"{directory} is not complete: run the same `mlsm npm datastore` again to resume")
            raise FileNotFoundError(f"{directory} is not a datastore; make one with `mlsm npm datastore`")
        self.meta = read_json(self.directory / META_FILE)
        version = self.meta.get("format") if isinstance(self.meta, dict) else None
        if version != FORMAT:
            raise ValueError(f"{directory} has format {version}, this version reads format {FORMAT}")
        check_json(self.meta, META_CHECK, self.directory / META_FILE)
        self.tokens = _opened(self.directory / TOKENS_FILE)
        self.block_starts = _opened(self.directory / BLOCKS_FILE)
        self._first_rows = np.cumsum([0, *self.meta["shard_keys"]])
        self._first_positions = self._read_first_positions()
        self._check_files()
        self.index = KeyIndex.open(self.directory)

    @classmethod
    def build(
        cls,
        data_bin: PathLike,
        checkpoint: PathLike,
        directory: PathLike,
        settings: DatastoreSettings | None = None,
        **options: Any,
    ) -> "PhraseDatastore":
        """Build the missing parts of a datastore, and open it; arguments and errors of :class:`DatastoreBuilder`."""
        builder = DatastoreBuilder(data_bin, checkpoint, directory, settings or DatastoreSettings(), **options)
        if not builder.build():
            raise ValueError(f"{directory}: shards are missing, another process may be deleting them")
        return cls(directory)

    def build_index(self, kind: str) -> None:
        """Make an index of the keys, unless there is one of this ``kind`` (``flat`` or ``ivfpq``), and search with it.

        Errors are those of :meth:`.KeyIndex.write`.
        """
        with in_turn(self.directory):
            self.index = KeyIndex.open(self.directory)  # another process may have made it meanwhile
            if self.index is None or self.index.kind != kind:
                rows = np.random.default_rng(0).choice(len(self), training_size(len(self)), replace=False)
                sample = self.keys_of(np.sort(rows))
                chunks = (keys.numpy() for keys in self._chunks(torch.device("cpu")))
                KeyIndex.write(self.directory, kind, self.meta["similarity"], sample, chunks, len(self))
                self.index = KeyIndex.open(self.directory)

    def _check_files(self) -> None:
        """Raise ValueError if a file has changed since it was sealed; older datastores have no hashes."""
        for name, sealed in self.meta.get(HASHES, {}).items():
            path = self.directory / Path(name).name
            if path.is_file() and sampled_sha256(path) != sealed:
                raise ValueError(
                    f"{path} is damaged, or belongs to another datastore; run the same `mlsm npm datastore` again"
                )
        starts = self.block_starts
        if len(starts) and (starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > len(self.tokens)):
            path = self.directory / BLOCKS_FILE
            raise ValueError(f"{path} does not hold the beginnings of blocks; run the same `mlsm npm datastore` again")

    def _read_first_positions(self) -> np.ndarray:
        """The position of each shard's first key; for an empty shard, of the next shard's first key."""
        firsts = []
        following = self.meta["num_tokens"]
        for shard in reversed(range(len(self.meta["shard_keys"]))):
            keys, positions = self._shard(shard)
            expected = (self.meta["shard_keys"][shard], self.meta["dim"])
            if keys.shape != expected or len(positions) != expected[0]:
                raise ValueError(f"{self.directory}: shard {shard} has keys {keys.shape}, meta.json says {expected}")
            following = int(positions[0]) if len(positions) else following
            firsts.append(following)
        return np.array(firsts[::-1], np.int64)

    def __len__(self) -> int:
        return int(self.meta["num_keys"])

    @property
    def dim(self) -> int:
        """Width of the keys."""
        return int(self.meta["dim"])

    def check_belongs_to(self, checkpoint: PathLike) -> None:
        """Raise ValueError unless the keys were made with this checkpoint."""
        expected = self.meta.get("fingerprints", {}).get("checkpoint", "unknown")
        fingerprint = FairseqEncoder.fingerprint_of(checkpoint)
        if expected != fingerprint:
            raise ValueError(
                f"{self.directory} was built with another checkpoint (SHA-256 {expected[:12]}) than {checkpoint} "
                f"({fingerprint[:12]}); build a datastore with the latter"
            )

    def _shard(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and positions, mapped at each call, since a process may have fewer maps than a datastore has shards."""
        keys = map_npy(shard_path(self.directory, shard, "keys"), ndim=2)
        positions = map_npy(shard_path(self.directory, shard, "positions"), ndim=1)
        return keys, positions

    def _chunks(self, device: torch.device) -> Iterator[Tensor]:
        """All keys in order, ``(c, dim)`` float32 on ``device``, a bounded number at a time."""
        size = max(1, (CHUNK_ENTRIES if device.type == "cpu" else CHUNK_ENTRIES_GPU) // self.dim)
        for shard in range(len(self.meta["shard_keys"])):
            keys = torch.from_numpy(self._shard(shard)[0])
            for start in range(0, len(keys), size):
                yield keys[start : start + size].to(device).float()

    def search(self, queries: Tensor, k: int, *, similarity: str = "inner") -> tuple[Tensor, Tensor]:
        """Find the nearest keys; the result is exact unless the index is approximate.

        ValueError if ``k`` is more than the number of keys, or the queries do not have the width of the keys.

        Args:
            queries: ``(n, dim)``.
            similarity: ``inner`` (inner product) or ``l2`` (negative squared distance).

        Returns:
            scores ``(n, k)`` float32, the largest first, and the rows of their keys ``(n, k)`` int64.
        """
        if not 1 <= k <= len(self):
            raise ValueError(f"k must be between 1 and the {len(self)} keys of {self.directory}, got {k}")
        if queries.size(-1) != self.dim:
            raise ValueError(f"queries are {queries.size(-1)} wide, the keys of {self.directory} are {self.dim} wide")
        queries = queries.float()
        if self.index is not None and self.index.similarity == similarity:
            return self._search_index(self.index, queries, k)
        best = queries.new_zeros(len(queries), 0)
        rows = torch.zeros(len(queries), 0, dtype=torch.long, device=queries.device)
        pending: list[Tensor] = []
        first = 0
        for keys in self._chunks(queries.device):
            pending.append(similarities(queries, keys, similarity))
            number = sum(scores.size(1) for scores in pending)
            if number >= SCORES_AT_ONCE:
                best, rows = _merged(best, rows, pending, first, k)
                first += number
                pending = []
        return _merged(best, rows, pending, first, k)

    def _search_index(self, index: KeyIndex, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        candidates = index.candidates(queries.cpu().numpy(), k)
        keys = torch.from_numpy(self.keys_of(candidates.ravel())).to(queries.device).view(*candidates.shape, self.dim)
        pairs = zip(queries, keys, strict=True)
        exact_scores = torch.cat(
            [similarities(query[None], candidate_keys, index.similarity) for query, candidate_keys in pairs]
        )
        scores, order = exact_scores.topk(k, dim=1)
        return scores, torch.from_numpy(candidates).to(queries.device).gather(1, order)

    def positions_of(self, rows: np.ndarray) -> np.ndarray:
        """Positions in ``tokens`` of the keys in ``rows``: int64, in the shape of ``rows``."""
        return self._look_up(np.ravel(rows), 1, np.zeros(np.size(rows), np.int64)).reshape(np.shape(rows))

    def keys_of(self, rows: np.ndarray) -> np.ndarray:
        """Keys ``(n, dim)`` float32 of rows ``(n,)``."""
        return self._look_up(rows, 0, np.zeros((len(rows), self.dim), np.float32))

    def _look_up(self, rows: np.ndarray, part: int, values: np.ndarray) -> np.ndarray:
        """Fill ``values`` from ``rows`` (n,) of a part of the shards (0: keys, 1: positions)."""
        shards = np.searchsorted(self._first_rows, rows, side="right") - 1
        for shard in np.unique(shards):
            chosen = shards == shard
            values[chosen] = self._shard(int(shard))[part][rows[chosen] - self._first_rows[shard]]
        return values

    def rows_of(self, positions: np.ndarray) -> np.ndarray:
        """Rows of the keys of tokens, -1 for a token without a key: int64, in the shape of ``positions``."""
        flat = np.asarray(positions, np.int64).ravel()
        rows = np.full(len(flat), -1, np.int64)
        shards = np.searchsorted(self._first_positions, flat, side="right") - 1
        for shard in np.unique(shards[shards >= 0]):
            chosen = np.flatnonzero(shards == shard)
            positions_of_keys = self._shard(int(shard))[1]
            first = np.searchsorted(positions_of_keys, flat[chosen], side="left")
            last = np.searchsorted(positions_of_keys, flat[chosen], side="right")
            rows[chosen[first < last]] = self._first_rows[shard] + first[first < last]
        return rows.reshape(np.shape(positions))

    def block_of(self, positions: np.ndarray) -> np.ndarray:
        """Numbers of the blocks that hold the tokens at ``positions``."""
        return np.searchsorted(self.block_starts, positions, side="right") - 1

    def positions_of_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """Positions in ``tokens`` of all tokens of some blocks, in the order of ``blocks``."""
        limits = np.append(self.block_starts, len(self.tokens))
        return np.concatenate([np.arange(limits[block], limits[block + 1]) for block in blocks])


def _opened(path: Path) -> np.ndarray:
    """An array of the datastore, mapped read-only, since a private map of the whole text could exceed the memory."""
    header = npy_header(path)
    if header is None or len(header.shape) != 1:
        raise ValueError(f"{path} is missing or damaged; run the same `mlsm npm datastore` again")
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _merged(best: Tensor, rows: Tensor, pending: list[Tensor], first: int, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of ``best`` (n, b), with their ``rows``, and of ``pending``, whose rows begin at ``first``."""
    if not pending:
        return best, rows
    new, places = torch.cat(pending, dim=1).topk(min(k, sum(scores.size(1) for scores in pending)), dim=1)
    scores = torch.cat([best, new], dim=1)
    rows = torch.cat([rows, places + first], dim=1)
    best, order = scores.topk(min(k, scores.size(1)), dim=1)
    return best, rows.gather(1, order)
