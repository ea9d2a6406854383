"""Build a phrase datastore: the hidden states of a corpus's tokens (Min et al., 2022)."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from mlsm_plugin.core.files.atomic_files import (
    PathLike,
    atomic_open,
    copy_file,
    sampled_sha256,
    sha256_of_files,
    write_npy,
)
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME
from mlsm_plugin.core.files.npy_files import npy_header
from mlsm_plugin.core.files.planned_folder import START_ANEW, PlannedFolder
from mlsm_plugin.core.files.process_rank import SINGLE_PROCESS, ProcessRank
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.files.sharded_store import MissingShardsError, ShardedStoreWriter, warn_of_full_disk
from mlsm_plugin.core.hidden_states.blocks import chunks_of, hidden_states_of
from mlsm_plugin.core.losses.span_contrastive import similarity_of
from mlsm_plugin.core.masking.word_boundaries import LONGEST_WORD, PieceClasses, without_marks, word_boundaries
from mlsm_plugin.core.text.text_files import numbered_lines
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from mlsm_plugin.fairseq_plugin.data.token_blocks import split_fingerprint
from mlsm_plugin.fairseq_plugin.text.symbol_files import special_symbols
from mlsm_plugin.retrieval.key_index import bytes_per_key
from mlsm_plugin.retrieval.settings import DatastoreSettings

FORMAT = 1
HASHES = "sampled_sha256"  # key in meta.json for a hash of each file
TOKENS_FILE = "tokens.npy"
BLOCKS_FILE = "block_starts.npy"
TOKEN_DTYPE = np.dtype(np.int32)
POSITION_DTYPE = np.dtype(np.int64)
CHUNK_ENTRIES = 1 << 19  # entries of keys that a CPU search reads at once; in float32 they fit into the cache


class DatastoreWriter(ShardedStoreWriter):
    """Writes a datastore shard by shard, in any order, in any number of runs and processes.

    Args:
        directory: the datastore; created with its first shard.
        plan: content of ``plan.json``; its ``num_tokens``, ``dim`` and ``dtype`` decide when files are whole.
        shard_tokens: number of tokens of each shard, which is also the largest number of its keys.
    """

    parts = ("keys", "positions")

    def __init__(self, directory: PathLike, plan: JsonObject, shard_tokens: list[int]) -> None:
        advice = f"{START_ANEW}, or choose another --output"
        super().__init__(PlannedFolder(directory, plan, advice=advice), len(shard_tokens))
        self._shard_tokens = shard_tokens

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return super().is_complete and self._has_text()

    def whole_shard(self, index: int) -> int | None:
        """Number of keys of a shard if its files are whole, else None; only reads headers."""
        keys = npy_header(self._path(index, "keys"))
        positions = npy_header(self._path(index, "positions"))
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
        """Write keys ``(n, dim)``, then the positions ``(n,)`` of their tokens; errors as for :meth:`_write_parts`."""
        assert len(keys) == len(positions) <= self._shard_tokens[index]
        self._write_parts(index, {"keys": keys, "positions": positions})

    def finish(self, tokens: Iterable[np.ndarray], block_starts: np.ndarray, dictionary: Path) -> None:
        """Write the text, which comes in pieces, remove the leftovers of interrupted runs, and seal with ``meta.json``.

        May be called again, and by several processes at the same time; all write the same bytes. MissingShardsError
        names missing shards.
        """
        counts = self._whole_shards()
        self._begin()
        if npy_header(self.directory / TOKENS_FILE) is None:
            with atomic_open(self.directory / TOKENS_FILE) as file:
                self._write_tokens(file, tokens)
        write_npy(self.directory / BLOCKS_FILE, block_starts.astype(POSITION_DTYPE, copy=False))
        copy_file(dictionary, self.directory / DICTIONARY_NAME)
        parts = [self._path(shard, part).name for shard in range(len(counts)) for part in self.parts]
        hashes = {name: sampled_sha256(self.directory / name) for name in (TOKENS_FILE, BLOCKS_FILE, *parts)}
        self.folder.seal({**self.folder.plan, "num_keys": sum(counts), "shard_keys": counts, HASHES: hashes})

    def _write_tokens(self, file: IO[bytes], tokens: Iterable[np.ndarray]) -> None:
        """Write the text as an npy file, piece by piece, so that it is never in memory as a whole."""
        number = self.folder.plan["num_tokens"]
        written = 0
        header = {"descr": TOKEN_DTYPE.str, "fortran_order": False, "shape": (number,)}
        np.lib.format.write_array_header_1_0(file, header)
        for piece in tokens:
            file.write(piece.astype(TOKEN_DTYPE).tobytes())
            written += len(piece)
        assert written == number, f"the text has {number} tokens, and {written} were written"

    def _has_text(self) -> bool:
        """Whether the files outside the shards are whole."""
        tokens = npy_header(self.directory / TOKENS_FILE)
        blocks = npy_header(self.directory / BLOCKS_FILE)
        text_is_whole = tokens is not None and tokens.shape == (self.folder.plan["num_tokens"],)
        return text_is_whole and blocks is not None and (self.directory / DICTIONARY_NAME).is_file()


@dataclass(frozen=True)
class _Shard:
    """A range of blocks of a split, and the offset of the split's tokens in ``tokens.npy``."""

    reader: BlockReader
    blocks: range
    offset: int

    @property
    def num_tokens(self) -> int:
        return int(self.reader.sizes[self.blocks.start : self.blocks.stop].sum())


class DatastoreBuilder:
    """Builds a datastore, or its missing parts, from a binarized dataset and the last hidden states of a model.

    ``directory`` is created if it is missing; for ``device``, ``fp16`` and ``batch_tokens`` see :class:`.ModelRun`.
    ValueError if ``directory`` was begun with another plan, or a block is longer than the model can take.
    """

    def __init__(
        self,
        data_bin: PathLike,
        checkpoint: PathLike,
        directory: PathLike,
        settings: DatastoreSettings,
        *,
        device: str | None = None,
        fp16: bool = False,
        batch_tokens: int = 8192,
    ) -> None:
        self.settings = settings
        self.data_bin = Path(data_bin)
        self.batch_tokens = batch_tokens
        self.encoder = FairseqEncoder(
            checkpoint, data_bin, layer=FairseqEncoder.layers_of(checkpoint), device=device, fp16=fp16
        )
        if settings.blocks.tokens_per_sample > self.encoder.max_tokens:
            raise ValueError(
                f"--tokens-per-sample {settings.blocks.tokens_per_sample} is more than the "
                f"{self.encoder.max_tokens} positions of the model"
            )
        self.readers = [BlockReader(data_bin, split, settings.blocks) for split in settings.splits]
        self.shards = list(self._cut())
        self.num_tokens = sum(reader.num_tokens for reader in self.readers)
        dictionary = self.encoder.dictionary
        special = [*special_symbols(dictionary), dictionary.index("<mask>")]
        self._pieces = PieceClasses.of_vocabulary(dictionary.symbols, special)
        self._stopword_ids = ids_of_words(dictionary.symbols, settings.stopwords)
        sizes = [shard.num_tokens for shard in self.shards]
        self.writer = DatastoreWriter(directory, self._planned(checkpoint, fp16), sizes)

    def _cut(self) -> Iterator[_Shard]:
        offset = 0
        for reader in self.readers:
            first = 0
            while first < len(reader):
                last = int(np.searchsorted(reader.starts, reader.starts[first] + self.settings.shard_tokens))
                yield _Shard(reader, range(first, last), offset)
                first = last
            offset += reader.num_tokens

    def _planned(self, checkpoint: PathLike, fp16: bool) -> JsonObject:
        settings = self.settings
        return {
            "format": FORMAT,
            "num_tokens": self.num_tokens,
            "num_shards": len(self.shards),
            "dim": self.encoder.dim,
            "similarity": similarity_of(self.encoder.cfg),
            "dtype": settings.dtype,
            "splits": list(settings.splits),
            "blocks": asdict(settings.blocks),
            "word_boundaries_only": settings.word_boundaries_only,
            "stopwords": sorted(settings.stopwords),
            "shard_tokens": settings.shard_tokens,
            "fp16": fp16,
            "fingerprints": {
                "checkpoint": self.encoder.fingerprint_of(checkpoint),
                "dictionary": sha256_of_files(self.data_bin / DICTIONARY_NAME),
                "splits": {split: split_fingerprint(self.data_bin / split) for split in settings.splits},
            },
        }

    def estimate(self, index: str = "none") -> str:
        """A line with the most disk space and memory that the datastore needs with an index of this kind."""
        per_token = self.encoder.dim * np.dtype(self.settings.dtype).itemsize + 8 + 4
        of_index = bytes_per_key(index, self.encoder.dim)
        disk = (per_token + of_index) * self.num_tokens
        memory = max(self.settings.shard_tokens * (per_token + 4 * self.encoder.dim), of_index * self.num_tokens)
        return (
            f"{self.num_tokens:,} tokens: at most {disk / 1e9:.3g} GB on disk ({per_token + of_index} bytes a token); "
            f"building needs about {memory / 1e9:.2g} GB of memory in addition to the model, searching "
            f"{4 * CHUNK_ENTRIES / 1e9:.2g} GB"
        )

    def build(self, process: ProcessRank = SINGLE_PROCESS) -> bool:
        """Write this process's missing shards, and seal the datastore if no other shard is missing.

        Returns whether it is complete; False while shards of other processes are missing. ValueError if a hidden state
        does not fit the dtype of the keys, or another process began another datastore.
        """
        if self.writer.is_complete:
            return True
        missing = self.writer.missing(process)
        self.writer.warn_of_full_disk(missing)
        total = sum(self.shards[index].num_tokens for index in missing)
        with Progress(total=total, desc="keys", unit="token", unit_scale=True) as progress:
            for index in missing:
                if not self.writer.has_shard(index):  # another process may have written it
                    self.writer.write_shard(index, *self._keys_of(self.shards[index]))
                progress.update(self.shards[index].num_tokens)
        try:
            self.writer.finish(self._text(), self._block_starts(), self.data_bin / DICTIONARY_NAME)
        except MissingShardsError:
            return False
        return True

    def _keys_of(self, shard: _Shard) -> tuple[np.ndarray, np.ndarray]:
        """Keys ``(n, dim)`` of a shard and the positions ``(n,)`` of their tokens."""
        reader = shard.reader
        positions = [np.zeros(0, np.int64)]
        keys = [np.zeros((0, self.encoder.dim), self.settings.dtype)]
        blocks = (part for index in shard.blocks for part in reader.block(index))
        for chunk in chunks_of(blocks, 4 * self.batch_tokens, with_bos=True):
            chunk_positions, hidden = hidden_states_of(chunk, reader, self.encoder, max_tokens=self.batch_tokens)
            kept = self._kept(reader, chunk_positions)
            positions.append(chunk_positions[kept] + shard.offset)
            keys.append(self._rounded(hidden.cpu().numpy()[kept], chunk_positions[kept]))
        return np.concatenate(keys), np.concatenate(positions)

    def _rounded(self, hidden: np.ndarray, positions: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            keys = hidden.astype(self.settings.dtype)
        broken = np.flatnonzero(~np.isfinite(keys).all(axis=1))
        if len(broken):
            raise ValueError(
                f"the hidden state of the token at position {positions[broken[0]]} is not finite in "
                f"{self.settings.dtype}; use --dtype float32, or another model if this one is broken"
            )
        return keys

    def _kept(self, reader: BlockReader, positions: np.ndarray) -> np.ndarray:
        """Which content tokens get a key; ``positions`` are their ascending positions, from whole blocks."""
        settings = self.settings
        if not (settings.word_boundaries_only or settings.stopwords) or len(positions) == 0:
            return np.ones(len(positions), bool)
        first = max(0, int(positions[0]) - LONGEST_WORD)  # far enough to see whether a word is long
        ids = reader.flat_tokens(first, min(int(positions[-1]) + 1 + LONGEST_WORD, reader.num_tokens))
        begins, ends = word_boundaries(ids, np.zeros(len(ids), np.int64), self._pieces)
        places = positions - first
        kept = np.ones(len(positions), bool)
        if settings.word_boundaries_only:
            kept &= (begins | ends)[places]
        if settings.stopwords:
            kept &= ~((begins & ends)[places] & np.isin(ids[places], self._stopword_ids))
        return kept

    def _text(self) -> Iterator[np.ndarray]:
        """The ids of all tokens, including tokens between documents, which are in no block."""
        step = self.settings.shard_tokens
        for reader in self.readers:
            for first in range(0, reader.num_tokens, step):
                yield reader.flat_tokens(first, min(first + step, reader.num_tokens))

    def _block_starts(self) -> np.ndarray:
        return np.concatenate([shard.reader.starts[list(shard.blocks)] + shard.offset for shard in self.shards])


def ids_of_words(symbols: Iterable[str], words: frozenset[str]) -> list[int]:
    """The ids of the symbols that are in ``words`` (lower case), ignoring their marks and capitals."""
    return [number for number, symbol in enumerate(symbols) if without_marks(symbol).lower() in words]


def read_stopwords(path: PathLike | None) -> frozenset[str]:
    """The words of a file with one word per line, in lower case; empty if ``path`` is None."""
    if path is None:
        return frozenset()
    return frozenset(line.strip().lower() for _, line in numbered_lines(path))
