"""The files of a phrase datastore, when they are whole, and the only class that writes them.

A datastore is a folder:

- ``tokens.npy``, (num_tokens,) int32: the text; ``block_starts.npy``, int64: where its blocks begin; ``dict.txt``;
- ``shard-00000.keys.npy``, (n, dim) float16 or float32: hidden states of tokens of a contiguous range of the text;
- ``shard-00000.positions.npy``, (n,) int64: the positions of these tokens in the text, ascending;
- ``plan.json``: what is being written, so that an interrupted build resumes and a different one is refused; it is kept;
- ``meta.json``: the same, and the number of keys; written last, so that a folder without it is not complete;
- ``index.faiss`` and ``index.json``, if there is an index (:mod:`~mlsm_plugin.retrieval.key_index`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from mlsm_plugin.files.atomic_files import copy_file, write_file, write_npy
from mlsm_plugin.files.npy_files import npy_header
from mlsm_plugin.files.planned_folder import START_ANEW, PlannedFolder
from mlsm_plugin.files.sharded_store import ShardedStoreWriter, warn_of_full_disk

FORMAT = 1
TOKENS_FILE = "tokens.npy"
BLOCKS_FILE = "block_starts.npy"
DICTIONARY_FILE = "dict.txt"
TOKEN_DTYPE = np.dtype(np.int32)
POSITION_DTYPE = np.dtype(np.int64)


class DatastoreWriter(ShardedStoreWriter):
    """Writes a datastore shard by shard, in any order, over any number of runs, in several processes at a time.

    Args:
        directory: the datastore; created with its first shard.
        plan: content of ``plan.json``; its ``num_tokens``, ``dim`` and ``dtype`` decide when files are whole.
        shard_tokens: number of tokens of each shard, and so the largest number of its keys.

    Raises:
        ValueError: the folder was begun with another plan.
    """

    parts = ("keys", "positions")

    def __init__(self, directory: str | os.PathLike[str], plan: dict[str, Any], shard_tokens: list[int]) -> None:
        folder = PlannedFolder(directory, plan, advice=f"{START_ANEW}, or choose another --output")
        super().__init__(folder, len(shard_tokens))
        self._shard_tokens = shard_tokens

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return super().is_complete and self._has_text()

    def whole_shard(self, index: int) -> int | None:
        """Number of keys of a shard if its files are whole, else None; reads only headers."""
        keys, positions = (npy_header(self._path(index, part)) for part in self.parts)
        if keys is None or positions is None or len(positions.shape) != 1:
            return None
        number = positions.shape[0]
        fits = (
            number <= self._shard_tokens[index]
            and positions.dtype == POSITION_DTYPE
            and keys.dtype == np.dtype(self.folder.plan["dtype"])
            and keys.shape == (number, self.folder.plan["dim"])
        )
        return number if fits else None

    def warn_of_full_disk(self, shards: Iterable[int]) -> None:
        """Log a warning if the disk has too little room for these shards and their text."""
        plan = self.folder.plan
        per_token = plan["dim"] * np.dtype(plan["dtype"]).itemsize + POSITION_DTYPE.itemsize + TOKEN_DTYPE.itemsize
        existing = next(folder for folder in (self.directory, *self.directory.absolute().parents) if folder.is_dir())
        warn_of_full_disk(existing, per_token * sum(self._shard_tokens[shard] for shard in shards))

    def write_shard(self, index: int, keys: np.ndarray, positions: np.ndarray) -> None:
        """Write the keys ``(n, dim)`` of one shard, then the positions ``(n,)`` of their tokens.

        A shard that another process, which was given it too, has written meanwhile is left alone.

        Raises:
            ValueError: another process began the datastore with another plan.
            OSError: a file cannot be written; the shard then still counts as missing.
        """
        assert len(keys) == len(positions) <= self._shard_tokens[index]
        if self.has_shard(index):
            return
        self._write_parts(index, {"keys": keys, "positions": positions})

    def finish(
        self, tokens: Callable[[], Iterable[np.ndarray]], block_starts: np.ndarray, dictionary: Path
    ) -> dict[str, Any]:
        """Write the text and, last, ``meta.json``; remove the remains of interrupted runs.

        May be called again, and by several processes at the same time: all write the same bytes.

        Args:
            tokens: a function that gives the ids of the text in pieces, in order.
            block_starts: where the blocks begin in it.
            dictionary: the ``dict.txt`` to copy.

        Returns:
            The content of ``meta.json``.

        Raises:
            MissingShardsError: shards are missing (the message names them).
            OSError: a file cannot be written.
        """
        counts = self._whole_shards()
        self._begin()
        if npy_header(self.directory / TOKENS_FILE) is None:
            write_file(self.directory / TOKENS_FILE, lambda file: self._write_tokens(file, tokens()))
        write_npy(self.directory / BLOCKS_FILE, block_starts.astype(POSITION_DTYPE, copy=False))
        copy_file(dictionary, self.directory / DICTIONARY_FILE)
        meta = {**self.folder.plan, "num_keys": sum(counts), "shard_keys": counts}
        self.folder.seal(meta)
        return meta

    def _write_tokens(self, file: IO[bytes], tokens: Iterable[np.ndarray]) -> None:
        """Write the text as an npy file, piece by piece, so that a build never holds the whole text in memory."""
        number, written = self.folder.plan["num_tokens"], 0
        header = {"descr": TOKEN_DTYPE.str, "fortran_order": False, "shape": (number,)}
        np.lib.format.write_array_header_1_0(file, header)
        for piece in tokens:
            file.write(piece.astype(TOKEN_DTYPE).tobytes())
            written += len(piece)
        assert written == number, f"the text has {number} tokens, and {written} were written"

    def _has_text(self) -> bool:
        """Whether the files that belong to no shard are whole."""
        tokens, blocks = (npy_header(self.directory / name) for name in (TOKENS_FILE, BLOCKS_FILE))
        return (
            tokens is not None
            and tokens.shape == (self.folder.plan["num_tokens"],)
            and blocks is not None
            and (self.directory / DICTIONARY_FILE).is_file()
        )
