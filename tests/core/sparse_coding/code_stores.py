"""Common parts of the tests of the code store: codes, their stores, and the bytes of these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.sparse_coding.code_store_writer import CodeStoreWriter
from mlsm_plugin.core.sparse_coding.encode import target_distribution

META = {"n_atoms": 40, "lambda": 0.05, "layer": 5}
BOUNDARIES = [0, 4, 9, 10]


def random_codes(seed: int, n_tokens: int, n_atoms: int = 40, density: float = 0.1) -> sp.csr_matrix:
    """Non-negative codes, some rows of which are empty."""
    rng = np.random.default_rng(seed)
    codes = sp.random(n_tokens, n_atoms, density=density, random_state=rng, format="csr")
    return sp.diags((rng.random(n_tokens) < 0.8).astype(float)) @ codes


def write_store(directory, codes, boundaries, meta=META) -> Path:
    writer = CodeStoreWriter(directory, meta, boundaries)
    for index, start, stop in writer.missing_shards():
        writer.write_shard(index, codes[start:stop])
    writer.finish()
    return Path(directory)


def folder_bytes(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def expected_rows(codes) -> np.ndarray:
    """What a store of ``codes`` holds, dense."""
    return target_distribution(codes).toarray().astype(np.float16).astype(np.float32)
