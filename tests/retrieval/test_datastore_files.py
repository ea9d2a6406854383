"""The files of a datastore: when a shard is whole, and which files remain after sealing."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.files.atomic_files import read_json
from mlsm_plugin.core.files.sharded_store import shard_path
from mlsm_plugin.retrieval.datastore_builder import DatastoreWriter

PLAN = {"format": 1, "num_tokens": 10, "dim": 3, "dtype": "float16"}
SIZES = [4, 5, 1]


def writer_of(directory: Path) -> DatastoreWriter:
    return DatastoreWriter(directory, PLAN, SIZES)


def write(writer: DatastoreWriter, index: int, number: int) -> None:
    positions = sum(SIZES[:index]) + np.arange(number)
    writer.write_shard(index, np.repeat(positions[:, None], 3, axis=1).astype(np.float16), positions)


def text() -> Iterator[np.ndarray]:
    yield np.arange(6)
    yield np.arange(6, 10)


def finish(writer: DatastoreWriter, folder: Path) -> dict[str, object]:
    (folder / "source.txt").write_text("a 1\n")
    writer.finish(text(), np.array([0, 5]), folder / "source.txt")
    return read_json(writer.directory / "meta.json")


def test_a_store_from_nothing_to_complete(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "store")
    for index, number in enumerate((4, 0, 1)):  # a shard may have fewer keys than tokens, and none
        assert writer.missing() == [*range(index, 3)]
        write(writer, index, number)
    assert not writer.is_complete
    meta = finish(writer, tmp_path)
    hashes = meta.pop("sampled_sha256")
    assert {*hashes} == {path.name for path in (tmp_path / "store").glob("*.npy")}
    assert meta == {**PLAN, "num_keys": 5, "shard_keys": [4, 0, 1]}
    assert writer.is_complete
    np.testing.assert_array_equal(np.load(tmp_path / "store" / "tokens.npy"), np.arange(10, dtype=np.int32))
    np.save(tmp_path / "expected.npy", np.arange(10, dtype=np.int32))
    assert (tmp_path / "expected.npy").read_bytes() == (tmp_path / "store" / "tokens.npy").read_bytes()
    assert np.load(tmp_path / "store" / "block_starts.npy").dtype == np.int64
    assert (tmp_path / "store" / "dict.txt").read_text() == "a 1\n"


def test_unfinished_store_is_not_sealed(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "store")
    write(writer, 1, 2)
    with pytest.raises(ValueError, match=r"lacks 2 of 3 shards \(\[0, 2\]\)"):
        finish(writer, tmp_path)
    assert not writer.is_sealed
    assert not (tmp_path / "store" / "tokens.npy").exists()


@pytest.mark.parametrize(
    ("part", "array"),
    [
        ("keys", np.zeros((3, 3), np.float16)),  # fewer than positions
        ("keys", np.zeros((4, 2), np.float16)),
        ("keys", np.zeros((4, 3), np.float32)),
        ("positions", np.zeros(4, np.int32)),
        ("positions", np.zeros((4, 1), np.int64)),
        ("positions", np.zeros(5, np.int64)),
    ],
)
def test_files_that_do_not_fit_together_are_a_missing_shard(tmp_path: Path, part: str, array: np.ndarray) -> None:
    writer = writer_of(tmp_path / "store")
    write(writer, 0, 4)
    assert writer.has_shard(0)
    np.save(shard_path(tmp_path / "store", 0, part), array)
    assert not writer.has_shard(0)


def test_shard_with_more_keys_than_tokens_is_missing(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "store")
    write(writer, 2, 1)
    np.save(shard_path(tmp_path / "store", 2, "keys"), np.zeros((2, 3), np.float16))
    np.save(shard_path(tmp_path / "store", 2, "positions"), np.zeros(2, np.int64))
    assert not writer.has_shard(2)


def test_a_text_of_another_length_is_not_written(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "store")
    for index in range(3):
        write(writer, index, 1)
    (tmp_path / "source.txt").write_text("a 1\n")
    with pytest.raises(AssertionError, match="the text has 10 tokens, and 3 were written"):
        writer.finish([np.arange(3)], np.array([0]), tmp_path / "source.txt")
    assert not writer.is_sealed
    assert not [path for path in (tmp_path / "store").iterdir() if path.name.endswith(".tmp")]


def test_disk_that_will_be_too_small_is_said_before_the_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    writer = writer_of(tmp_path / "deep" / "store")
    with caplog.at_level(logging.WARNING):
        writer.warn_of_full_disk([1])  # 5 tokens of 6 + 8 + 4 bytes
        assert caplog.text == ""
        writer.warn_of_full_disk([0, 1])
    assert "needs about 1.6e-07 GB more, but only 1e-07 GB are free" in caplog.text
    assert list(tmp_path.iterdir()) == []
