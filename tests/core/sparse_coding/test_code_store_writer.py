"""Writing the code store: interruptions, damage, the shards' figures, several processes, the order of keys."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.code_store_writer import META_KEYS, CodeStoreWriter
from mlsm_plugin.core.sparse_coding.stored_codes import ShardRows
from tests.core.sparse_coding.code_stores import (
    BOUNDARIES,
    META,
    expected_rows,
    folder_bytes,
    random_codes,
    write_store,
)


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
    (directory / f".shard-00001.atoms.npy.{'0' * 32}.tmp").write_bytes(b"half")


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


def test_failed_repair_of_a_finished_store_unseals_it(tmp_path, monkeypatch):
    store = write_store(tmp_path / "s", random_codes(3, 10), BOUNDARIES)
    (tmp_path / "s" / "shard-00000.weights.npy").write_bytes(b"damaged")
    writer = CodeStoreWriter(store, META, BOUNDARIES)

    def full_disk(file, array, allow_pickle):
        file.write(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        writer.write_shard(0, random_codes(4, 4))
    assert [index for index, _, _ in writer.missing_shards()] == [0]
    assert not writer.is_complete


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


@pytest.mark.parametrize("first", ["hf:model", None])
def test_the_name_of_the_model_is_that_of_the_first_seal(tmp_path, first):
    codes, gap = random_codes(5, 10), np.random.default_rng(5).random(10)
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES, with_gaps=True)
    write_with_gaps(writer, codes, gap)
    assert writer.finish(first).get("auxiliary") == first
    whole = folder_bytes(tmp_path / "s")
    writer.finish("hf:moved")
    assert folder_bytes(tmp_path / "s") == whole
    (tmp_path / "s" / "meta.json").write_text("{")  # damaged: written again
    assert writer.finish("hf:moved")["auxiliary"] == "hf:moved"


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


def test_store_with_gaps_wants_them(tmp_path):
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES, with_gaps=True)
    codes = random_codes(0, 4)
    with pytest.raises(ValueError, match="shard 0 lacks the duality gaps"):
        writer.write_shard(0, codes)


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


def test_shard_that_another_process_replaces_during_the_seal_does_no_harm(tmp_path, monkeypatch):
    store = write_store(tmp_path / "s", random_codes(0, 10), BOUNDARIES)
    sealed = (store / "meta.json").read_bytes()
    writer = CodeStoreWriter(store, META, BOUNDARIES)
    look = writer._whole_shards

    def looked_then_replaced():
        whole = look()
        (store / "shard-00001.indptr.npy").unlink()
        return whole

    monkeypatch.setattr(writer, "_whole_shards", looked_then_replaced)
    writer.finish()
    assert (store / "meta.json").read_bytes() == sealed


# ---- coders without gaps, and the order of the keys --------------------------------------------------------


def test_coded_tokens_are_counted_without_gaps(tmp_path):
    codes, gap = random_codes(5, 10), np.zeros(10)
    writer = CodeStoreWriter(tmp_path / "s", META, BOUNDARIES)
    write_with_gaps(writer, codes, gap)  # a coder may give gaps that the store does not want
    meta = writer.finish()
    assert meta["coded_tokens"] == len(np.flatnonzero(np.arange(10) % 3))
    assert not {"gap_mean", "gap_max"} & set(meta)
    figures = [json.loads((tmp_path / "s" / f"shard-0000{i}.gap.json").read_text()) for i in range(3)]
    assert [list(shard) for shard in figures] == [["coded_tokens"]] * 3
    assert sum(shard["coded_tokens"] for shard in figures) == meta["coded_tokens"]


def test_of_a_matrix_the_rows_that_are_not_empty_count_as_coded(tmp_path):
    codes = random_codes(0, 10)
    meta = CodeStore(write_store(tmp_path / "s", codes, BOUNDARIES)).meta
    assert meta["coded_tokens"] == (np.diff(codes.indptr) > 0).sum() < 10
    empty = CodeStore(write_store(tmp_path / "empty", sp.csr_matrix((10, 40)), BOUNDARIES)).meta
    assert (empty["coded_tokens"], empty["nnz"]) == (0, 0)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"coded_tokens": "4"}', "{}"])
def test_shard_with_a_damaged_figures_file_is_missing(tmp_path, content):
    store = write_store(tmp_path / "s", random_codes(0, 10), BOUNDARIES)
    whole = folder_bytes(store)
    (store / "shard-00002.gap.json").write_text(content)
    writer = CodeStoreWriter(store, META, BOUNDARIES)
    assert writer.missing_shards() == [(2, 9, 10)]
    write_store(store, random_codes(0, 10), BOUNDARIES)
    assert folder_bytes(store) == whole


def test_a_coverage_that_leaves_no_token_is_refused(tmp_path):
    writer = CodeStoreWriter(tmp_path / "s", {"n_atoms": 4, "coverage": 0.01}, [0, 3])
    writer.write_shard(0, ShardRows(3, 4))
    with pytest.raises(ValueError, match=r"no token of .+ was coded; delete the folder and encode with more"):
        writer.finish()


def test_all_codes_empty_is_refused_in_the_words_of_no_coder(tmp_path):
    writer = CodeStoreWriter(tmp_path / "s", {"n_atoms": 4}, [0, 3])
    rows = ShardRows(3, 4)
    rows.add(np.array([0, 2]), sp.csr_matrix((2, 4)))
    writer.write_shard(0, rows)
    with pytest.raises(ValueError, match="codes of") as error:
        writer.finish()
    assert str(error.value) == (
        f"all 2 codes of {tmp_path / 's'} are empty; delete the folder and encode with other settings of the coder"
    )
    assert not writer.is_sealed


SETTINGS = {
    "n_atoms": 40, "lambda": 0.05, "layer": 5, "coverage": 1.0, "coverage_seed": 0, "solver": "auto",
    "tolerance": 1e-4, "max_nonzeros": None, "fp16": False, "blocks": {"b": 1, "a": 2}, "dictionary_health": None,
    "fingerprints": {"split": "x"},
}  # fmt: skip
TOTALS = ["format_version", "token_count", "nnz", "mean_nonzeros", "coded_tokens", "gap_mean", "gap_max", "shards"]


@pytest.mark.parametrize("seed", range(4))
def test_keys_have_the_order_of_the_format_whatever_the_callers(tmp_path, seed):
    names = np.random.default_rng(seed).permutation([*SETTINGS, "kind", "a_new_one"]).tolist()
    meta = {name: SETTINGS.get(name, name) for name in names}
    codes, gap = random_codes(5, 10), np.random.default_rng(5).random(10)
    writer = CodeStoreWriter(tmp_path / "s", meta, BOUNDARIES, with_gaps=True)
    write_with_gaps(writer, codes, gap)
    writer.finish()
    new = [name for name in names if name not in SETTINGS]
    plan, sealed = (json.loads((tmp_path / "s" / f"{name}.json").read_text()) for name in ("plan", "meta"))
    assert list(plan) == ["format_version", "meta", "boundaries"]
    assert list(plan["meta"]) == [*SETTINGS, *new]
    assert list(sealed) == [*SETTINGS, *TOTALS, *new]
    assert list(sealed["blocks"]) == ["b", "a"]
    assert (*SETTINGS, *TOTALS) == META_KEYS
    other_order = CodeStoreWriter(tmp_path / "s", dict(sorted(meta.items())), BOUNDARIES, with_gaps=True)
    assert other_order.is_complete
