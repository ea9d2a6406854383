"""Round trips, interruptions and damage of the code store."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import re
import tempfile
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.sparse_coding import code_store
from mlsm_plugin.sparse_coding.code_store import CodeStore, CodeStoreWriter, ShardRows
from mlsm_plugin.sparse_coding.encode import target_distribution

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


def damage_nothing(directory: Path) -> None:
    """A run that was stopped between two shards."""


def damage_truncate(directory: Path) -> None:
    path = directory / "shard-00000.weights.npy"
    path.write_bytes(path.read_bytes()[:-2])


def damage_empty(directory: Path) -> None:
    (directory / "shard-00000.indptr.npy").write_bytes(b"")


def damage_no_indptr(directory: Path) -> None:
    (directory / "shard-00000.indptr.npy").unlink()


def damage_dtype(directory: Path) -> None:
    path = directory / "shard-00000.atoms.npy"
    np.save(path, np.load(path).astype(np.int64))


def damage_trailing(directory: Path) -> None:
    with open(directory / "shard-00000.atoms.npy", "ab") as file:
        file.write(b"xx")


def damage_leftover(directory: Path) -> None:
    (directory / ".shard-00001.atoms.npy.123.tmp").write_bytes(b"half")


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (damage_nothing, [1, 2]),
        (damage_truncate, [0, 1, 2]),
        (damage_empty, [0, 1, 2]),
        (damage_no_indptr, [0, 1, 2]),
        (damage_dtype, [0, 1, 2]),
        (damage_trailing, [0, 1, 2]),
        (damage_leftover, [1, 2]),
    ],
)
def test_resumed_run_leaves_the_bytes_of_an_uninterrupted_one(tmp_path, damage, missing):
    codes = random_codes(2, 10)
    whole = write_store(tmp_path / "whole", codes, BOUNDARIES)
    CodeStoreWriter(tmp_path / "resumed", META, BOUNDARIES).write_shard(0, codes[:4])
    damage(tmp_path / "resumed")
    writer = CodeStoreWriter(tmp_path / "resumed", META, BOUNDARIES)
    assert [index for index, _, _ in writer.missing_shards()] == missing
    assert not writer.is_complete
    write_store(tmp_path / "resumed", codes, BOUNDARIES)
    assert folder_bytes(tmp_path / "resumed") == folder_bytes(whole)
    assert CodeStoreWriter(tmp_path / "resumed", META, BOUNDARIES).is_complete


def test_another_plan_is_refused_by_name(tmp_path):
    write_store(tmp_path / "s", random_codes(0, 10), BOUNDARIES)
    with pytest.raises(ValueError, match="was begun with other settings") as error:
        CodeStoreWriter(tmp_path / "s", {**META, "lambda": 0.1, "new": "x"}, [0, 5, 10])
    assert str(error.value) == (
        f"{tmp_path / 's'} was begun with other settings: boundaries is [0, 4, 9, 10] there and [0, 5, 10] now; "
        "lambda is 0.05 there and 0.1 now; new is None there and 'x' now. "
        "Delete the folder to start anew, or pass the settings that it was begun with"
    )


def test_unfinished_store_is_not_read(tmp_path):
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES)
    writer.write_shard(1, random_codes(0, 5))
    with pytest.raises(ValueError, match=r"lacks 2 of 3 shards \(\[0, 2\]\); write them before finishing the store"):
        writer.finish()
    with pytest.raises(ValueError, match=r"holds no meta\.json: it is not a finished code store; run `mlsm encode`"):
        CodeStore(tmp_path / "s")


@pytest.mark.parametrize("failing", ["weights", "indptr", "meta.json"])
def test_full_disk_leaves_no_whole_store(tmp_path, monkeypatch, failing):
    codes = random_codes(3, 10)
    whole = write_store(tmp_path / "whole", codes, BOUNDARIES)
    real_replace = os.replace

    def full_disk(source, target):
        if failing in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        real_replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with pytest.raises(OSError, match="No space left on device"):
            write_store(tmp_path / "s", codes, BOUNDARIES)
    assert not list((tmp_path / "s").glob(".*.tmp"))
    assert not CodeStoreWriter(tmp_path / "s", META, BOUNDARIES).is_complete
    with pytest.raises(ValueError, match="not a finished code store"):
        CodeStore(tmp_path / "s")
    write_store(tmp_path / "s", codes, BOUNDARIES)
    assert folder_bytes(tmp_path / "s") == folder_bytes(whole)


def test_failed_rewrite_of_a_finished_store_unseals_it(tmp_path, monkeypatch):
    store = write_store(tmp_path / "s", random_codes(3, 10), BOUNDARIES)
    writer = CodeStoreWriter(store, META, BOUNDARIES)

    def full_disk(file, array, allow_pickle):
        file.write(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(code_store.np, "save", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        writer.write_shard(0, random_codes(4, 4))
    assert [index for index, _, _ in writer.missing_shards()] == [0]
    assert not writer.is_complete


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
    with pytest.raises(ValueError, match="rows 3 to 11 are not within the store's 0 to 10"):
        reader.rows(3, 11)
    meta = (store / "meta.json").read_text()
    (store / "meta.json").write_text(meta.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="has the format version 2, and this version reads 1"):
        CodeStore(store)


@pytest.mark.parametrize(
    ("meta", "boundaries", "message"),
    [
        (META, [0], "boundaries must start at 0 and ascend strictly to the token count, got [0]"),
        (META, [1, 2], "boundaries must start at 0"),
        (META, [0, 3, 3], "boundaries must start at 0"),
        ({}, [0, 1], "meta must give the size of the dictionary as n_atoms >= 1, got None"),
    ],
)
def test_writer_rejects_plans(tmp_path, meta, boundaries, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CodeStoreWriter(tmp_path / "s", meta, boundaries)


def test_writer_rejects_codes(tmp_path):
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES)
    with pytest.raises(ValueError, match="there is no shard 3; the plan has 0 to 2"):
        writer.write_shard(3, random_codes(0, 4))
    with pytest.raises(ValueError, match=re.escape("shard 0 must have the shape (4, 40) (tokens, atoms), got (5, 40)")):
        writer.write_shard(0, random_codes(0, 5))
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="codes must be finite and >= 0"):
            writer.write_shard(0, sp.csr_matrix(([bad], ([0], [0])), shape=(4, 40)))


# ---- gaps, and several processes -------------------------------------------------------------------------


def shard_rows(codes: sp.csr_matrix, gap: np.ndarray, coded: np.ndarray) -> ShardRows:
    """The ``coded`` rows, added in two parts."""
    rows = ShardRows(*codes.shape)
    half = len(coded) // 2
    for part in (coded[:half], coded[half:]):
        rows.add(part, codes[part], gap[part])
    return rows


def write_with_gaps(writer: CodeStoreWriter, codes: sp.csr_matrix, gap: np.ndarray) -> None:
    for index, start, stop in writer.missing_shards():
        coded = np.flatnonzero(np.arange(start, stop) % 3)  # flat positions decide
        writer.write_shard(index, shard_rows(codes[start:stop], gap[start:stop], coded))


def test_rows_in_parts_are_the_codes_and_the_gaps_are_totalled(tmp_path):
    codes, gap = random_codes(5, 10), np.random.default_rng(5).random(10)
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES, with_gaps=True)
    write_with_gaps(writer, codes, gap)
    meta = writer.finish()
    expected = np.flatnonzero(np.arange(10) % 3)
    assert meta["coded_tokens"] == len(expected)
    assert meta["gap_mean"] == pytest.approx(gap[expected].mean())
    assert meta["gap_max"] == gap[expected].max()
    store = CodeStore(tmp_path / "s")
    assert store.meta == meta
    kept = np.isin(np.arange(10), expected)[:, None]
    np.testing.assert_array_equal(store.rows(0, 10).toarray(), np.where(kept, expected_rows(codes), 0))


@pytest.mark.parametrize("damage", ["absent", "truncated", "other"])
def test_shard_without_its_gap_file_is_missing(tmp_path, damage):
    codes, gap = random_codes(5, 10), np.random.default_rng(5).random(10)
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES, with_gaps=True)
    write_with_gaps(writer, codes, gap)
    writer.finish()
    whole = folder_bytes(tmp_path / "s")
    path = tmp_path / "s" / "shard-00001.gap.json"
    if damage == "absent":
        path.unlink()
    else:
        path.write_text('{"coded_tokens": 3' if damage == "truncated" else '{"coded_tokens": 3}')
    assert [index for index, _, _ in writer.missing_shards()] == [1]
    assert not writer.is_complete
    write_with_gaps(writer, codes, gap)
    writer.finish()
    assert folder_bytes(tmp_path / "s") == whole


def test_store_with_gaps_wants_them_and_rows_in_order(tmp_path):
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES, with_gaps=True)
    codes = random_codes(0, 4)
    with pytest.raises(ValueError, match="shard 0 comes without the duality gaps"):
        writer.write_shard(0, codes)
    rows = ShardRows(4, 40)
    rows.add(np.array([1, 2]), codes[:2], np.zeros(2))
    for wrong in ([2, 3], [3, 3], [3, 4]):
        with pytest.raises(ValueError, match="rows must ascend from 3 to at most 3"):
            rows.add(np.array(wrong), codes[:2], np.zeros(2))
    with pytest.raises(ValueError, match=re.escape("codes must have the shape (1, 40)")):
        rows.add(np.array([3]), codes[:2], np.zeros(2))


def test_nothing_is_written_before_the_first_shard(tmp_path):
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES)
    with pytest.raises(ValueError, match="codes must be finite"):
        writer.write_shard(0, sp.csr_matrix(([-1.0], ([0], [0])), shape=(4, 40)))
    assert not (tmp_path / "s").exists()


def test_of_two_plans_begun_at_the_same_time_one_is_refused(tmp_path):
    codes = random_codes(0, 10)
    first, same = (CodeStoreWriter(tmp_path / "s", META, BOUNDARIES) for _ in range(2))
    other = CodeStoreWriter(tmp_path / "s", {**META, "lambda": 0.1}, BOUNDARIES)
    first.write_shard(0, codes[:4])
    with pytest.raises(ValueError, match=r"was begun with other settings: lambda is 0\.05 there and 0\.1 now"):
        other.write_shard(1, codes[4:9])
    same.write_shard(1, codes[4:9])
    assert [index for index, _, _ in first.missing_shards()] == [2]


def test_plan_that_appears_while_another_is_written_wins(tmp_path, monkeypatch):
    writer = CodeStoreWriter(tmp_path / "s", {**META, "lambda": 0.1}, BOUNDARIES)
    real_link = os.link

    def slow_link(source, target):
        monkeypatch.setattr(os, "link", real_link)
        CodeStoreWriter(tmp_path / "s", META, BOUNDARIES).write_shard(0, random_codes(0, 4))
        real_link(source, target)

    monkeypatch.setattr(os, "link", slow_link)
    with pytest.raises(ValueError, match="was begun with other settings"):
        writer.write_shard(1, random_codes(0, 5))
    assert not list((tmp_path / "s").glob(".*.tmp"))


def test_store_is_sealed_by_many_at_the_same_time(tmp_path):
    store = write_store(tmp_path / "s", random_codes(0, 10), BOUNDARIES)
    whole, failures = folder_bytes(store), []
    barrier = threading.Barrier(4)

    def seal() -> None:
        writer = CodeStoreWriter(store, META, BOUNDARIES)
        try:
            for _ in range(25):
                (store / "meta.json").unlink(missing_ok=True)
                barrier.wait(timeout=60)
                writer.finish()
                barrier.wait(timeout=60)
        except Exception as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=seal) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert folder_bytes(store) == whole
