"""Indexes of a datastore's keys, made with faiss (Johnson et al., 2017), to search without reading all keys.

They lie next to the shards: ``index.faiss`` holds the index, and ``index.json``, written last, identifies its keys.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlsm_plugin.core.files.atomic_files import atomic_open, read_json, sha256_of_files, write_json
from mlsm_plugin.core.files.json_checks import check_json, fields, text
from mlsm_plugin.core.files.planned_folder import META_FILE
from mlsm_plugin.core.files.progress import Progress

logger = logging.getLogger(__name__)

INDEX_FILE = "index.faiss"
INDEX_META_FILE = "index.json"
META_CHECK = fields({"kind": text, "similarity": text, "of": text})
INDEX_KINDS = ("none", "flat", "ivfpq")
KEYS_PER_CENTROID = 39  # faiss requires at least this many for each of the 256 centroids of a part of a vector
LEAST_KEYS = KEYS_PER_CENTROID * 256
PART_WIDTH = 2  # smallest width of a product quantizer's parts
RESCORED = 8  # an approximate index returns this many times the requested keys, which are then compared exactly


def faiss_or_none() -> Any:
    """The faiss package, or None if it is not installed."""
    try:
        import faiss
    except ImportError:
        return None
    return faiss


def check_installed() -> None:
    """Raise ValueError unless faiss is installed."""
    if faiss_or_none() is None:
        raise ValueError("--index needs faiss: pip install 'mlsm_plugin[retrieval]', or use --index none")


def bytes_per_key(kind: str, dim: int) -> int:
    """Bytes on disk per key; searching a ``flat`` index reads them all."""
    return {"none": 0, "flat": 4 * dim, "ivfpq": _parts(dim) + 8}[kind]


def _parts(dim: int) -> int:
    """The largest number of equal parts of a vector with at least :data:`PART_WIDTH` dimensions, for quantization."""
    return max(parts for parts in range(1, max(1, dim // PART_WIDTH) + 1) if dim % parts == 0)


class KeyIndex:
    """An index of all keys of a datastore, which can only search by one ``similarity``, ``inner`` or ``l2``.

    Its ``kind`` is ``flat`` (exact) or ``ivfpq`` (approximate: inverted lists of product-quantized keys).
    """

    def __init__(self, index: Any, kind: str, similarity: str) -> None:
        self._index = index
        self.kind = kind
        self.similarity = similarity

    @classmethod
    def open(cls, directory: Path) -> "KeyIndex | None":
        """The index in a datastore's folder; None if there is none, or, with a warning, if it cannot be used."""
        path = directory / INDEX_META_FILE
        try:
            meta = check_json(read_json(path), META_CHECK, path)
        except FileNotFoundError:
            return None
        faiss = faiss_or_none()
        if faiss is None:
            logger.warning("%s has an index, but faiss is not installed: all keys are compared", directory)
            return None
        if meta["of"] != sha256_of_files(directory / META_FILE):
            logger.warning("the index in %s is for other keys: all keys are compared", directory)
            return None
        flag = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
        try:
            index = faiss.read_index(str(directory / INDEX_FILE), flag)
        except RuntimeError:  # of faiss, for any damage
            logger.warning("the index in %s is missing or damaged: all keys are compared", directory)
            return None
        return cls(index, meta["kind"], meta["similarity"])

    @classmethod
    def write(
        cls, directory: Path, kind: str, similarity: str, sample: np.ndarray, chunks: Iterator[np.ndarray], size: int
    ) -> None:
        """Make the index of a datastore; ValueError if there are too few keys to train on, or faiss is not installed.

        ``sample`` holds :func:`training_size` keys ``(n, dim)`` float32 to train on. ``chunks`` yields all ``size``
        keys in order, ``(c, dim)`` float32 at a time.
        """
        check_installed()
        faiss = faiss_or_none()
        metric = faiss.METRIC_INNER_PRODUCT if similarity == "inner" else faiss.METRIC_L2
        if kind == "ivfpq" and size < LEAST_KEYS:
            raise ValueError(
                f"--index ivfpq needs at least {LEAST_KEYS:,} keys to be trained on, there are {size:,}; use "
                "--index flat or none"
            )
        dim = sample.shape[1]
        description = "Flat" if kind == "flat" else f"IVF{clusters_of(size)},PQ{_parts(dim)}"
        index = faiss.index_factory(dim, description, metric)
        with Progress(total=size, desc="index", unit="key", unit_scale=True) as progress:
            if not index.is_trained:
                index.train(sample)
            for chunk in chunks:
                index.add(chunk)
                progress.update(len(chunk))
        meta = {"kind": kind, "similarity": similarity, "of": sha256_of_files(directory / META_FILE)}
        (directory / INDEX_META_FILE).unlink(missing_ok=True)  # the old file must not describe the new index
        with atomic_open(directory / INDEX_FILE) as file:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
        write_json(directory / INDEX_META_FILE, meta)

    def candidates(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Rows ``(n, c)`` int64 of keys that probably include the ``k`` nearest to ``(n, dim)`` float32; c >= k."""
        if self.kind == "flat":
            rows: np.ndarray = self._index.search(queries, k)[1]
            return rows
        count = min(RESCORED * k, self._index.ntotal)
        probes = min(self._index.nlist, max(32, self._index.nlist // 16))
        while True:
            self._index.nprobe = probes
            rows = self._index.search(queries, count)[1]
            if probes == self._index.nlist or (rows >= 0).all():
                return rows
            probes = min(self._index.nlist, 4 * probes)  # the searched lists held too few keys


def clusters_of(num_keys: int) -> int:
    """Number of inverted lists: four times the square root of ``num_keys``, as faiss advises; fewer for few keys."""
    return max(1, min(round(4 * math.sqrt(num_keys)), num_keys // KEYS_PER_CENTROID))


def training_size(num_keys: int) -> int:
    """Number of keys to train an index on: 64 per list, which is a small part of a large corpus."""
    return min(num_keys, max(64 * clusters_of(num_keys), LEAST_KEYS))
