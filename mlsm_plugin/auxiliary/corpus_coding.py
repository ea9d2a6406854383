"""The codes of a whole binarized split: blocks to hidden states to sparse codes to the code store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from tqdm import tqdm

from mlsm_plugin.atomic_files import sha256_of_files
from mlsm_plugin.auxiliary.block_reader import Block, BlockReader, BlockSettings, hidden_states_of
from mlsm_plugin.auxiliary.fairseq_encoder import AuxiliaryEncoder
from mlsm_plugin.data.token_blocks import split_fingerprint
from mlsm_plugin.sparse_coding.code_store import CodeStoreWriter
from mlsm_plugin.sparse_coding.dictionary import Dictionary
from mlsm_plugin.sparse_coding.encode import normalize_rows, sparse_encode


@dataclass(frozen=True)
class CodingSettings:
    """What decides the codes of a split, and how the work is cut up.

    Attributes:
        layer: hidden state of the auxiliary model.
        lambda_: weight of the L1 penalty.
        blocks: what the auxiliary model sees at once.
        solver, tolerance, max_nonzeros, threads: see :func:`sparse_encode`.
        fp16: run the auxiliary model in half precision.
        batch_tokens: tokens of one forward pass and of one call of the solver; bounds the memory.
        shard_tokens: tokens of a shard, the unit of resuming.
    """

    layer: int
    lambda_: float
    blocks: BlockSettings = field(default_factory=BlockSettings)
    solver: str = "auto"
    tolerance: float = 1e-4
    max_nonzeros: int | None = None
    threads: int | None = None
    fp16: bool = False
    batch_tokens: int = 8192
    shard_tokens: int = 1 << 18


@dataclass
class CodingFigures:
    """What came out: tokens that were coded now, the certified relative duality gaps, the store."""

    directory: Path
    already_complete: bool = False
    coded_tokens: int = 0
    gap_sum: float = 0.0
    gap_max: float = 0.0

    @property
    def gap_mean(self) -> float:
        """Mean over the tokens coded now."""
        return self.gap_sum / max(1, self.coded_tokens)


def check_dictionary_fits(dictionary: Dictionary, *, auxiliary_fingerprint: str, layer: int) -> None:
    """Raise ValueError where the dictionary says that it was learned from another model or layer."""
    learned_from = dictionary.meta.get("auxiliary_fingerprint")
    if learned_from is not None and learned_from != auxiliary_fingerprint:
        raise ValueError(
            f"the dictionary was learned from another auxiliary checkpoint (SHA-256 {learned_from[:12]}) than the "
            f"given one ({auxiliary_fingerprint[:12]}); pass that checkpoint, or learn a new dictionary"
        )
    learned_layer = dictionary.meta.get("layer")
    if learned_layer is not None and learned_layer != layer:
        raise ValueError(f"the dictionary was learned from layer {learned_layer}, not from --layer {layer}")


def encode_split(
    data_bin: str | os.PathLike[str],
    split: str,
    *,
    auxiliary: str | os.PathLike[str],
    dictionary: Dictionary,
    settings: CodingSettings,
    device: str | None = None,
) -> CodingFigures:
    """Write ``DATA_BIN/<split>.codes``; goes on where a killed run stopped.

    Raises:
        ValueError: files that do not belong together, or an existing store made with other settings.
        FileNotFoundError: a missing split or checkpoint.
    """
    if not os.path.isfile(auxiliary):
        raise FileNotFoundError(f"auxiliary checkpoint {auxiliary} does not exist")
    fingerprint = sha256_of_files(auxiliary)
    check_dictionary_fits(dictionary, auxiliary_fingerprint=fingerprint, layer=settings.layer)
    reader = BlockReader(data_bin, split, settings.blocks)
    boundaries = shard_boundaries(reader, settings.shard_tokens)
    meta = _store_meta(Path(data_bin) / split, dictionary, fingerprint, settings)
    figures = CodingFigures(Path(data_bin) / f"{split}.codes")
    # a store is begun once the model fits, so that a wrong command leaves nothing in the way of the right one
    encoder = (
        None if figures.directory.exists() else _fitting_encoder(auxiliary, data_bin, dictionary, settings, device)
    )
    writer = CodeStoreWriter(figures.directory, meta, boundaries)
    if writer.is_complete:
        figures.already_complete = True
        return figures
    encoder = encoder or _fitting_encoder(auxiliary, data_bin, dictionary, settings, device)
    missing = writer.missing_shards()
    remaining = sum(stop - start for _, start, stop in missing)
    with tqdm(
        total=reader.num_tokens, initial=reader.num_tokens - remaining, desc=f"coding {split}", unit="token",
        unit_scale=True,
    ) as progress:  # fmt: skip
        for index, start, stop in missing:
            pieces = []
            for positions, codes in _coded_chunks(reader, encoder, dictionary, settings, (start, stop), figures):
                pieces.append((positions, codes))
                progress.update(len(positions))
            writer.write_shard(index, _rows_of_shard(pieces, start, stop, len(dictionary.atoms)))
            progress.n = stop  # special symbols are not coded
    writer.finish()
    return figures


def shard_boundaries(reader: BlockReader, shard_tokens: int) -> list[int]:
    """Token offsets at which shards begin (and the end): block starts, about ``shard_tokens`` apart.

    No block is in two shards, so that a shard depends on its own blocks only.
    """
    boundaries = [0]
    while boundaries[-1] + shard_tokens < reader.num_tokens:
        following = np.searchsorted(reader.starts, boundaries[-1] + shard_tokens)
        if following == len(reader.starts):
            break
        boundaries.append(int(reader.starts[following]))
    return [*boundaries, reader.num_tokens]


def _store_meta(split: Path, dictionary: Dictionary, fingerprint: str, settings: CodingSettings) -> dict[str, Any]:
    return {
        "n_atoms": len(dictionary.atoms),
        "lambda": settings.lambda_,
        "layer": settings.layer,
        "coverage": 1.0,
        "solver": settings.solver,
        "tolerance": settings.tolerance,
        "max_nonzeros": settings.max_nonzeros,
        "fp16": settings.fp16,
        "blocks": asdict(settings.blocks),
        "dictionary_health": dictionary.meta.get("health"),
        "fingerprints": {
            "split": split_fingerprint(split),
            "dictionary": dictionary.fingerprint,
            "auxiliary": fingerprint,
        },
    }


def _fitting_encoder(
    auxiliary: str | os.PathLike[str],
    data_bin: str | os.PathLike[str],
    dictionary: Dictionary,
    settings: CodingSettings,
    device: str | None,
) -> AuxiliaryEncoder:
    """The auxiliary model; ValueError where the dictionary or the blocks do not fit it."""
    encoder = AuxiliaryEncoder(auxiliary, data_bin, layer=settings.layer, device=device, fp16=settings.fp16)
    width = dictionary.atoms.shape[1]
    if encoder.dim != width:
        raise ValueError(
            f"the dictionary is {width} wide, the hidden states of the auxiliary model are {encoder.dim} wide"
        )
    if settings.blocks.tokens_per_sample > encoder.max_tokens:
        raise ValueError(
            f"--tokens-per-sample {settings.blocks.tokens_per_sample} is more than the {encoder.max_tokens} positions "
            "of the auxiliary model"
        )
    return encoder


def _coded_chunks(
    reader: BlockReader,
    encoder: AuxiliaryEncoder,
    dictionary: Dictionary,
    settings: CodingSettings,
    span: tuple[int, int],
    figures: CodingFigures,
) -> Iterator[tuple[np.ndarray, sparse.csr_matrix]]:
    """Positions and codes of the content tokens of a shard, about ``batch_tokens`` at a time."""
    for blocks in _chunks_of_blocks(reader, span, settings.batch_tokens):
        positions, hidden = hidden_states_of(blocks, reader, encoder, max_tokens=settings.batch_tokens)
        if len(positions) == 0:
            continue
        coded = sparse_encode(
            normalize_rows(hidden),
            dictionary.atoms,
            lambda_=settings.lambda_,
            solver=settings.solver,
            tolerance=settings.tolerance,
            max_nonzeros=settings.max_nonzeros,
            threads=settings.threads,
        )
        figures.coded_tokens += len(positions)
        figures.gap_sum += float(coded.gap.sum())
        figures.gap_max = max(figures.gap_max, float(coded.gap.max()))
        yield positions, coded.codes


def _chunks_of_blocks(reader: BlockReader, span: tuple[int, int], max_tokens: int) -> Iterator[list[Block]]:
    """The blocks that begin in ``span``, in chunks of about ``max_tokens`` tokens."""
    chunk: list[Block] = []
    size = 0
    first, last = np.searchsorted(reader.starts, span)
    for index in range(first, last):
        if chunk and size + reader.sizes[index] > max_tokens:
            yield chunk
            chunk, size = [], 0
        chunk.extend(reader.block(index))
        size += int(reader.sizes[index])
    if chunk:
        yield chunk


def _rows_of_shard(
    pieces: list[tuple[np.ndarray, sparse.csr_matrix]], start: int, stop: int, num_atoms: int
) -> sparse.csr_matrix:
    """Codes of all tokens of a shard ``(stop - start, n_atoms)``, empty where nothing was coded.

    The pieces' positions are ascending, so only the row pointers have to be spread.
    """
    counts = np.zeros(stop - start, np.int64)
    for positions, codes in pieces:
        counts[positions - start] = np.diff(codes.indptr)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    if not pieces:
        return sparse.csr_matrix((stop - start, num_atoms), dtype=np.float32)
    data = np.concatenate([codes.data for _, codes in pieces])
    indices = np.concatenate([codes.indices for _, codes in pieces])
    return sparse.csr_matrix((data, indices, indptr), shape=(stop - start, num_atoms))
