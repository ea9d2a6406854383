"""Reading the code store: look-ups, errors that name the damage."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from tests.core.sparse_coding.code_stores import BOUNDARIES, META, expected_rows, random_codes, write_store


def lookup_dense(store: CodeStore, positions: np.ndarray) -> np.ndarray:
    """The rows of a lookup, put back into (n, n_atoms)."""
    atoms, weights = store.lookup(positions)
    dense = np.zeros((len(positions), store.num_atoms), dtype=np.float32)
    rows, columns = np.nonzero(atoms >= 0)
    dense[rows, atoms[rows, columns]] = weights[rows, columns]
    assert (weights[atoms < 0] == 0).all()
    return dense


@st.composite
def stores(draw):
    """Seeds, shard lengths of each store, and positions (repeated, unordered, some of them -1)."""
    lengths = draw(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=3))
    total = sum(map(sum, lengths))
    positions = draw(st.lists(st.integers(-1, total - 1), max_size=30))
    return draw(st.integers(0, 2**32 - 1)), lengths, np.array(positions, dtype=np.int64)


@settings(max_examples=40, deadline=None)
@given(case=stores(), n_atoms=st.sampled_from([1, 40, 2**16, 2**16 + 1, 100_000]))
def test_lookup_and_rows_equal_the_codes(case, n_atoms):
    seed, lengths, positions = case
    codes = random_codes(seed, sum(map(sum, lengths)), n_atoms, density=min(0.5, 4 / n_atoms))
    with tempfile.TemporaryDirectory() as parent:
        offset, directories = 0, []
        for number, shard_lengths in enumerate(lengths):
            boundaries = [0, *np.cumsum(shard_lengths).tolist()]
            part = codes[offset : offset + boundaries[-1]]
            directory = Path(parent) / f"train{number}.codes"
            directories.append(write_store(directory, part, boundaries, {"n_atoms": n_atoms}))
            offset += boundaries[-1]
        store = CodeStore(directories)
        assert (store.num_tokens, store.num_atoms, len(store)) == (codes.shape[0], n_atoms, codes.shape[0])
        expected = np.concatenate([expected_rows(codes), np.zeros((1, n_atoms), np.float32)])
        np.testing.assert_array_equal(lookup_dense(store, positions), expected[positions])
        start, stop = sorted(np.random.default_rng(seed).integers(0, store.num_tokens + 1, 2))
        np.testing.assert_array_equal(store.rows(start, stop).toarray(), expected[start:stop])
        assert store.rows(start, stop).dtype == np.float32
        atoms, weights = store.lookup(positions)
        assert (atoms.dtype, weights.dtype) == (np.int32, np.float16)
        longest = max((np.diff(codes.indptr)[p] for p in positions if p >= 0), default=0)
        assert atoms.shape == weights.shape == (len(positions), longest)


def test_files_types_and_size(tmp_path):
    codes = random_codes(0, 10)
    store = write_store(tmp_path / "small.codes", codes, BOUNDARIES)
    for index, (start, stop) in enumerate(pairwise(BOUNDARIES)):
        parts = {part: np.load(store / f"shard-0000{index}.{part}.npy") for part in ("indptr", "atoms", "weights")}
        assert [parts[part].dtype for part in ("indptr", "atoms", "weights")] == [np.uint32, np.uint16, np.float16]
        assert parts["indptr"].shape == (stop - start + 1,)
        nbytes = sum(array.nbytes for array in parts.values())
        assert nbytes <= 4 * codes[start:stop].nnz + 4 * (stop - start + 1)
    wide = write_store(tmp_path / "wide.codes", random_codes(0, 3, 2**16 + 1, 1e-4), [0, 3], {"n_atoms": 2**16 + 1})
    assert np.load(wide / "shard-00000.atoms.npy").dtype == np.uint32


def test_meta_counts(tmp_path):
    codes = random_codes(0, 10)
    meta = CodeStore(write_store(tmp_path / "s", codes, BOUNDARIES)).meta
    assert {key: meta[key] for key in META} == META
    assert (meta["format_version"], meta["token_count"], meta["nnz"]) == (1, 10, codes.nnz)
    assert meta["mean_nonzeros"] == codes.nnz / 10
    assert [(shard["start"], shard["stop"]) for shard in meta["shards"]] == [(0, 4), (4, 9), (9, 10)]
    assert sum(shard["nnz"] for shard in meta["shards"]) == codes.nnz


def test_weights_that_round_to_zero_are_left_out(tmp_path):
    codes = sp.csr_matrix(np.array([[1.0, 1e-9, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    store = CodeStore(write_store(tmp_path / "s", codes, [0, 2], {"n_atoms": 4}))
    atoms, weights = store.lookup(np.array([0, 1]))
    assert atoms.tolist() == [[0, 3], [-1, -1]]
    assert weights.tolist() == [[0.5, 0.5], [0, 0]]
    assert store.lookup(np.array([1, -1]))[0].shape == (2, 0)


def read_in_child(pickled: bytes, queue) -> None:
    store = pickle.loads(pickled)
    queue.put(lookup_dense(store, np.arange(store.num_tokens)))


@pytest.mark.slow
def test_pickled_store_works_in_a_spawned_process(tmp_path):
    codes = random_codes(1, 10)
    store = CodeStore(write_store(tmp_path / "s", codes, BOUNDARIES))
    store.lookup(np.arange(10))
    pickled = pickle.dumps(store)
    assert len(pickled) < 10_000
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=(pickled, queue))
    child.start()
    np.testing.assert_array_equal(queue.get(timeout=60), expected_rows(codes))
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("part", ["indptr", "atoms", "weights"])
def test_reader_names_a_damaged_file(tmp_path, part):
    store = write_store(tmp_path / "s", random_codes(0, 10), BOUNDARIES)
    path = store / f"shard-00001.{part}.npy"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    message = f"{path} has {size - 1} bytes instead of {size}; run `mlsm encode` again"
    with pytest.raises(ValueError, match=re.escape(message)):
        CodeStore(store)
    path.unlink()
    with pytest.raises(ValueError, match=re.escape(f"{path} has 0 bytes instead of {size}")):
        CodeStore(store)


def test_reader_errors(tmp_path):
    store = write_store(tmp_path / "s", random_codes(0, 10), BOUNDARIES)
    other = write_store(tmp_path / "other", random_codes(0, 10, 50), BOUNDARIES, {"n_atoms": 50})
    with pytest.raises(ValueError, match=r"has codes over 50 atoms but .* over 40; encode both with the same"):
        CodeStore([store, other])
    with pytest.raises(ValueError, match="no code store was given; pass at least one directory"):
        CodeStore([])
    reader = CodeStore(str(store))
    for position in (-2, 10):
        with pytest.raises(ValueError, match=f"position {position} is outside the store; it must be -1 or 0 to 9"):
            reader.lookup(np.array([0, position]))
    with pytest.raises(ValueError, match="positions must be a 1-D int array, got float64"):
        reader.lookup(np.array([0.5]))
    with pytest.raises(ValueError, match="positions must be a 1-D int array"):
        reader.lookup(np.zeros((2, 2), dtype=int))
    with pytest.raises(ValueError, match="rows 3 to 11 are outside the store; they must be within 0 to 10"):
        reader.rows(3, 11)
    meta = (store / "meta.json").read_text()
    (store / "meta.json").write_text(meta.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="has the format version 2, and this version reads 1"):
        CodeStore(store)
