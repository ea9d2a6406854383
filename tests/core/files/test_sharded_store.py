"""The sharded store, written by real processes: some are killed, some work at the same time, some fill the disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.files.npy_files import npy_header
from mlsm_plugin.core.files.planned_folder import PlannedFolder
from mlsm_plugin.core.files.process_rank import ProcessRank
from mlsm_plugin.core.files.sharded_store import MissingShardsError, ShardedStoreWriter, shard_path, warn_of_full_disk

FORK = multiprocessing.get_context("fork")
SHARDS = 6
ROWS = 20_000


class Numbers(ShardedStoreWriter):
    """Shard ``i`` holds the numbers from ``i * ROWS`` on, and its own size."""

    parts = ("values", "count")

    def __init__(self, directory: Path, **plan: object) -> None:
        super().__init__(PlannedFolder(directory, {"rows": ROWS, **plan}), SHARDS)

    def whole_shard(self, index: int) -> int | None:
        values, count = (npy_header(self._path(index, part)) for part in self.parts)
        return ROWS if values is not None and count is not None and values.shape == (ROWS,) else None

    def write(self, index: int) -> None:
        values = np.arange(index * ROWS, (index + 1) * ROWS)
        self._write_parts(index, {"values": values, "count": np.array([ROWS])}, {"note": {"index": index}})

    def run(self, process: ProcessRank = ProcessRank()) -> None:  # noqa: B008
        for index in self.missing(process):
            if not self.has_shard(index):
                self.write(index)
        with contextlib.suppress(MissingShardsError):  # the last process can
            self.finish()

    def finish(self) -> None:
        counts = self._whole_shards()
        self.folder.seal({**self.folder.plan, "total": sum(counts)})


def folder_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("whole") / "store"
    Numbers(directory).run()
    return folder_bytes(directory)


def test_a_store_from_nothing_to_complete(tmp_path, whole):
    store = Numbers(tmp_path / "store")
    assert (store.missing(), store.is_sealed, store.is_complete) == ([*range(SHARDS)], False, False)
    assert not store.directory.exists()
    store.write(2)
    with pytest.raises(ValueError, match=r"lacks 5 of 6 shards \(\[0, 1, 3, 4, 5\]\); write them before"):
        store.finish()
    assert not store.is_sealed
    store.run()
    assert store.is_complete
    assert sorted(whole) == sorted(
        ["meta.json", "plan.json"]
        + [f"shard-0000{i}.{part}" for i in range(SHARDS) for part in ("values.npy", "count.npy", "note.json")]
    )
    assert folder_bytes(store.directory) == whole


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_shares_of_the_work_are_the_whole_work(tmp_path, whole, order):
    shares = [Numbers(tmp_path / "store").missing(ProcessRank(index, 3)) for index in range(3)]
    assert sorted(index for share in shares for index in share) == [*range(SHARDS)]
    for index in order:
        assert not (tmp_path / "store" / "meta.json").exists()
        Numbers(tmp_path / "store").run(ProcessRank(index, 3))
    assert folder_bytes(tmp_path / "store") == whole


def test_a_shard_that_is_replaced_takes_the_seal_away_first(tmp_path, monkeypatch):
    store = Numbers(tmp_path / "store")
    store.run()
    for part in ("values.npy", "note.json"):
        (store.directory / f"shard-00003.{part}").write_bytes(b"damaged")
    seen = []
    real_replace = os.replace

    def watching(source, target):
        seen.append((Path(target).name, store.is_sealed, store.has_shard(3)))
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", watching)
    store.write(3)
    assert seen == [(f"shard-00003.{part}", False, False) for part in ("note.json", "values.npy", "count.npy")]
    assert store.has_shard(3)


def test_a_whole_shard_stays_and_the_seal_too(tmp_path, whole):
    store = Numbers(tmp_path / "store")
    store.run()
    before = {path: path.stat().st_ino for path in store.directory.iterdir()}
    store.write(3)
    assert {path: path.stat().st_ino for path in store.directory.iterdir()} == before
    assert folder_bytes(store.directory) == whole


@pytest.mark.parametrize("where", ["values.npy", "count.npy", "note.json", "meta.json", "plan.json"])
def test_full_disk_leaves_no_whole_store_and_the_same_run_resumes(tmp_path, monkeypatch, whole, where):
    def full_disk(real):
        def replace(source, target):
            if str(target).endswith(where):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(source, target)

        return replace

    with monkeypatch.context() as patch:
        for name in ("replace", "link"):
            patch.setattr(os, name, full_disk(getattr(os, name)))
        with pytest.raises(OSError, match="No space left on device"):
            Numbers(tmp_path / "store").run()
    assert not list((tmp_path / "store").glob(".*.tmp"))
    assert not Numbers(tmp_path / "store").is_complete
    Numbers(tmp_path / "store").run()
    assert folder_bytes(tmp_path / "store") == whole


def run_with_little_disk(directory: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # less than a shard
    try:
        Numbers(directory).run()
    except OSError as error:
        os._exit(error.errno or 1)


def test_file_that_may_not_grow_in_a_real_process(tmp_path, whole):
    process = FORK.Process(target=run_with_little_disk, args=(tmp_path / "store",))
    process.start()
    process.join(60)
    assert process.exitcode == errno.EFBIG
    assert Numbers(tmp_path / "store").missing() == [*range(SHARDS)]
    Numbers(tmp_path / "store").run()
    assert folder_bytes(tmp_path / "store") == whole


def run_store(directory: Path) -> None:
    Numbers(directory).run()


def check_nothing_half_is_whole(directory: Path) -> int:
    """How many shards are whole; each of them holds its numbers."""
    store = Numbers(directory)
    there = sorted(set(range(SHARDS)) - set(store.missing()))
    for index in there:
        np.testing.assert_array_equal(
            np.load(shard_path(directory, index, "values")), np.arange(index * ROWS, (index + 1) * ROWS)
        )
    assert not store.is_sealed or len(there) == SHARDS
    return len(there)


def run_until(directory: Path, operation: int | None, count) -> None:
    """Kill the own process before its ``operation``-th change of the disk; tell how many there were."""
    real = {name: getattr(os, name) for name in ("fsync", "replace", "link", "unlink", "mkdir")}

    def counted(name: str):
        def change(*args, **options):
            if count.value == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            count.value += 1
            return real[name](*args, **options)

        return change

    for name in real:
        setattr(os, name, counted(name))
    run_store(directory)


def test_killed_before_any_change_of_the_disk_nothing_half_is_taken_for_whole(tmp_path, whole):
    def run(directory: Path, operation: int | None) -> tuple[int | None, int]:
        count = FORK.Value("i", 0)
        process = FORK.Process(target=run_until, args=(directory, operation, count))
        process.start()
        process.join(60)
        return process.exitcode, count.value

    code, operations = run(tmp_path / "counted", None)
    assert code == 0
    assert operations > 6 * SHARDS
    rng = random.Random(2)
    chosen = {*range(14), *rng.sample(range(operations), 10), *range(operations - 4, operations)}
    progress = set()
    for operation in sorted(chosen):
        directory = tmp_path / f"store-{operation}"
        assert run(directory, operation) == (-signal.SIGKILL, operation)
        if directory.exists():
            progress.add(check_nothing_half_is_whole(directory))
        run_store(directory)
        assert folder_bytes(directory) == whole
    assert {0, 1, SHARDS} < progress


@pytest.mark.slow
def test_killed_at_random_times_again_and_again_until_a_run_comes_through(tmp_path, whole):
    start = time.perf_counter()
    run_store(tmp_path / "timed")
    usual = time.perf_counter() - start
    rng, kills = random.Random(1), 0
    for trial in range(6):
        directory = tmp_path / f"store-{trial}"
        for _ in range(4):
            process = FORK.Process(target=run_store, args=(directory,))
            process.start()
            process.join(rng.uniform(0, usual / 2))
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
            if directory.exists():
                check_nothing_half_is_whole(directory)
        run_store(directory)
        assert folder_bytes(directory) == whole
    assert kills > 0


def run_at_once(directory: Path, barrier) -> None:
    barrier.wait(60)
    Numbers(directory).run()


def test_writers_of_the_same_shards_at_the_same_time_leave_one_whole_store(tmp_path, whole):
    """All of them write all that is missing, and each removes leftovers while others write."""
    for trial in range(6):
        directory = tmp_path / f"store-{trial}"
        barrier = FORK.Barrier(3)
        processes = [FORK.Process(target=run_at_once, args=(directory, barrier)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert folder_bytes(directory) == whole


def watch_whole_shards(directory: Path) -> None:
    """End when a shard that was whole is not whole any more."""
    store, seen = Numbers(directory), set()
    while seen <= (there := set(range(SHARDS)) - set(store.missing())):
        seen |= there


def write_all_at_once(directory: Path, barrier) -> None:
    """Write every shard, as a process does that has computed it while others did the same."""
    barrier.wait(60)
    store = Numbers(directory)
    for index in range(SHARDS):
        store.write(index)


@pytest.mark.slow
def test_a_shard_that_is_whole_stays_whole_while_others_write_the_same(tmp_path):
    for trial in range(6):
        directory = tmp_path / f"store-{trial}"
        barrier = FORK.Barrier(3)
        watching = FORK.Process(target=watch_whole_shards, args=(directory,))
        processes = [FORK.Process(target=write_all_at_once, args=(directory, barrier)) for _ in range(3)]
        for process in (watching, *processes):
            process.start()
        for process in processes:
            process.join(120)
        watching.kill()
        watching.join(60)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert watching.exitcode == -signal.SIGKILL  # it has seen no shard vanish


def test_another_plan_is_refused_before_a_file_is_written(tmp_path):
    first, other = Numbers(tmp_path / "store"), Numbers(tmp_path / "store", seed=2)
    first.write(0)
    before = folder_bytes(tmp_path / "store")
    with pytest.raises(ValueError, match="seed is None there and 2 now"):
        other.write(1)
    with pytest.raises(ValueError, match="was begun with other settings"):
        Numbers(tmp_path / "store", seed=2)
    assert folder_bytes(tmp_path / "store") == before


def test_a_store_whose_folder_is_deleted_meanwhile_is_an_error(tmp_path):
    store = Numbers(tmp_path / "store")
    store.write(0)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(FileNotFoundError):
        store.write(1)


def test_a_disk_that_will_be_too_small_is_said(tmp_path, monkeypatch, caplog):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 10**9))
    with caplog.at_level(logging.WARNING):
        warn_of_full_disk(tmp_path, 10**9)
        assert caplog.text == ""
        warn_of_full_disk(tmp_path, 2.5e9)
    assert f"{tmp_path} needs about 2.5 GB more, but only 1 GB are free" in caplog.text
