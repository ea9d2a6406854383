"""Building a phrase datastore: the hidden states of a corpus' tokens (Min et al., 2022)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlsm_plugin.data.token_blocks import split_fingerprint
from mlsm_plugin.files.atomic_files import sha256_of_files
from mlsm_plugin.files.progress import Progress
from mlsm_plugin.files.sharded_store import MissingShardsError
from mlsm_plugin.files.work_share import ALL_OF_IT, WorkShare
from mlsm_plugin.hidden_states.block_reader import Block, BlockReader, hidden_states_of
from mlsm_plugin.hidden_states.fairseq_encoder import FairseqEncoder
from mlsm_plugin.losses.span_contrastive import similarity_of
from mlsm_plugin.retrieval.datastore_files import DICTIONARY_FILE, FORMAT, DatastoreWriter
from mlsm_plugin.retrieval.key_index import bytes_per_key
from mlsm_plugin.retrieval.settings import DatastoreSettings
from mlsm_plugin.tokenization.text_files import numbered_lines
from mlsm_plugin.tokenization.word_boundaries import LONGEST_WORD, PieceClasses, without_marks, word_boundaries

# How many entries of the keys a search on the CPU reads at once; in float32 they fit into its cache.
CHUNK_ENTRIES = 1 << 19


@dataclass(frozen=True)
class _Shard:
    """A contiguous range of the blocks of one split, and where its tokens are in ``tokens.npy``."""

    number: int
    split: int
    blocks: range
    offset: int


class DatastoreBuilder:
    """Builds a datastore, or its missing parts.

    Args:
        data_bin: binarized dataset of the corpus.
        checkpoint: the model; its last hidden states are the keys.
        directory: folder of the datastore; it is created if it is missing.
        settings: the settings that decide the keys.
        device, fp16: device of the model, and whether it runs in half precision.
        batch_tokens: tokens in one forward pass.

    Raises:
        ValueError: ``directory`` was begun with another plan, or a block is longer than the model can take.
    """

    def __init__(
        self,
        data_bin: str | os.PathLike[str],
        checkpoint: str | os.PathLike[str],
        directory: str | os.PathLike[str],
        settings: DatastoreSettings,
        *,
        device: str | None = None,
        fp16: bool = False,
        batch_tokens: int = 8192,
    ) -> None:
        self.settings = settings
        self.data_bin, self.batch_tokens = Path(data_bin), batch_tokens
        self.encoder = FairseqEncoder(
            checkpoint, data_bin, layer=FairseqEncoder.layers_of(checkpoint), device=device, fp16=fp16
        )
        self._fingerprint = self.encoder.fingerprint_of(checkpoint)
        if settings.blocks.tokens_per_sample > self.encoder.max_tokens:
            raise ValueError(
                f"--tokens-per-sample {settings.blocks.tokens_per_sample} is more than the "
                f"{self.encoder.max_tokens} positions of the model"
            )
        self.readers = [BlockReader(data_bin, split, settings.blocks) for split in settings.splits]
        self.shards = list(self._cut())
        self.num_tokens = sum(reader.num_tokens for reader in self.readers)
        dictionary = self.encoder.dictionary
        special = [*range(dictionary.nspecial), dictionary.index("<mask>")]
        self._pieces = PieceClasses.of_vocabulary(dictionary.symbols, special)
        self._stopword_ids = ids_of_words(dictionary.symbols, settings.stopwords)
        self.writer = DatastoreWriter(directory, self._planned(fp16), [self._tokens_of(shard) for shard in self.shards])

    def _cut(self) -> Iterator[_Shard]:
        number = offset = 0
        for split, reader in enumerate(self.readers):
            first = 0
            while first < len(reader):
                last = int(np.searchsorted(reader.starts, reader.starts[first] + self.settings.shard_tokens))
                last = max(first + 1, last)
                yield _Shard(number, split, range(first, last), offset)
                number, first = number + 1, last
            offset += reader.num_tokens

    def _planned(self, fp16: bool) -> dict[str, Any]:
        settings = self.settings
        return {
            "format": FORMAT,
            "num_tokens": self.num_tokens,
            "num_shards": len(self.shards),
            "dim": self.encoder.dim,
            "similarity": similarity_of(self.encoder.cfg),
            "dtype": settings.dtype,
            "splits": list(settings.splits),
            "blocks": {
                "tokens_per_sample": settings.blocks.tokens_per_sample,
                "sample_break_mode": settings.blocks.sample_break_mode,
            },
            "word_boundaries_only": settings.word_boundaries_only,
            "stopwords": sorted(settings.stopwords),
            "shard_tokens": settings.shard_tokens,
            "fp16": fp16,
            "fingerprints": {
                "checkpoint": self._fingerprint,
                "dictionary": sha256_of_files(self.data_bin / DICTIONARY_FILE),
                "splits": {split: split_fingerprint(self.data_bin / split) for split in settings.splits},
            },
        }

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.writer.is_complete

    def estimate(self, index: str = "none") -> str:
        """The disk and memory that the datastore needs at most with an index of this kind, as a line of text."""
        per_token = self.encoder.dim * np.dtype(self.settings.dtype).itemsize + 8 + 4
        of_index = bytes_per_key(index, self.encoder.dim)
        disk = (per_token + of_index) * self.num_tokens
        memory = max(self.settings.shard_tokens * (per_token + 4 * self.encoder.dim), of_index * self.num_tokens)
        return (
            f"{self.num_tokens:,} tokens: at most {disk / 1e9:.3g} GB on disk ({per_token + of_index} bytes a token); "
            f"building needs about {memory / 1e9:.2g} GB of memory in addition to the model, searching "
            f"{4 * CHUNK_ENTRIES / 1e9:.2g} GB"
        )

    def build(self, share: WorkShare = ALL_OF_IT) -> bool:
        """Write the missing shards of this process; a process that finds none missing afterwards seals the datastore.

        Args:
            share: which shards belong to this process.

        Returns:
            Whether the datastore is complete; False while shards of other processes are missing.

        Raises:
            ValueError: a hidden state does not fit the dtype of the keys, or another process began another datastore.
            OSError: a file cannot be written; run the same command again to resume.
        """
        if self.is_complete:
            return True
        wanted = self.writer.missing(share)
        self.writer.warn_of_full_disk(wanted)
        total = sum(self._tokens_of(self.shards[index]) for index in wanted)
        with Progress(total=total, desc="keys", unit="token", unit_scale=True) as progress:
            for index in wanted:
                # another process may have written it, also while the keys were computed; it may be reading it now
                if not self.writer.has_shard(index):
                    keys = self._keys_of(self.shards[index])
                    if not self.writer.has_shard(index):
                        self.writer.write_shard(index, *keys)
                progress.update(self._tokens_of(self.shards[index]))
        try:
            self.writer.finish(self._text, self._block_starts(), self.data_bin / DICTIONARY_FILE)
        except MissingShardsError:
            return False
        return True

    def _tokens_of(self, shard: _Shard) -> int:
        return int(self.readers[shard.split].sizes[shard.blocks.start : shard.blocks.stop].sum())

    def _keys_of(self, shard: _Shard) -> tuple[np.ndarray, np.ndarray]:
        """Keys ``(n, dim)`` of a shard and the positions ``(n,)`` of their tokens."""
        reader = self.readers[shard.split]
        positions, keys = [np.zeros(0, np.int64)], [np.zeros((0, self.encoder.dim), self.settings.dtype)]
        blocks = [part for index in shard.blocks for part in reader.block(index)]
        for chunk in _chunks_of(blocks, 4 * self.batch_tokens):
            found, hidden = hidden_states_of(chunk, reader, self.encoder, max_tokens=self.batch_tokens)
            kept = self._kept(reader, found)
            positions.append(found[kept] + shard.offset)
            keys.append(self._rounded(hidden.cpu().numpy()[kept], found[kept]))
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
        """Which content tokens get a key; ``positions`` are theirs, ascending, and from whole blocks."""
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
        """The ids of all tokens, a shard at a time."""
        for shard in self.shards:
            reader = self.readers[shard.split]
            first = int(reader.starts[shard.blocks.start])
            yield reader.flat_tokens(first, first + self._tokens_of(shard))

    def _block_starts(self) -> np.ndarray:
        offsets = np.cumsum([0, *(reader.num_tokens for reader in self.readers)])
        return np.concatenate([reader.starts + offset for reader, offset in zip(self.readers, offsets, strict=False)])


def _chunks_of(blocks: list[Block], max_tokens: int) -> Iterator[list[Block]]:
    """``blocks`` in order, about ``max_tokens`` tokens at a time."""
    chunk: list[Block] = []
    size = 0
    for block in blocks:
        if chunk and size + len(block.tokens) > max_tokens:
            yield chunk
            chunk, size = [], 0
        chunk.append(block)
        size += len(block.tokens)
    if chunk:
        yield chunk


def ids_of_words(symbols: Iterable[str], words: frozenset[str]) -> list[int]:
    """The ids of the symbols that are one of some lower-case words, whatever marks and capitals they have."""
    return [number for number, symbol in enumerate(symbols) if without_marks(symbol).lower() in words]


def read_stopwords(path: str | os.PathLike[str] | None) -> frozenset[str]:
    """The words of a file with one word in each line, lower-cased; no words without a file."""
    if path is None:
        return frozenset()
    return frozenset(line.strip().lower() for _, line in numbered_lines(path))
