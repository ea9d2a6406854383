from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.files import atomic_files
from mlsm_plugin.core.files.atomic_files import (
    atomic_directory,
    atomic_open,
    check_output_file,
    copy_file,
    read_json,
    remembered_digest,
    remove_leftovers,
    sampled_sha256,
    sha256_of_files,
    temporary_path,
    write_json,
    write_npy,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("mode", "content"), [("wb", b"\x00\xff"), ("w", "gr\u00fc\u00df dich\n")])
def test_a_written_file_is_whole_and_alone(tmp_path, mode, content):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_open(path, mode) as file:
        file.write(content)
        file.flush()
        assert path.read_bytes() == b"old"  # until the end
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode("utf-8"))
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted():
        with atomic_open(str(path)) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_disk_that_is_full_at_the_flush_leaves_no_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised, atomic_open(tmp_path / "file") as file:
        file.write(b"all")
    assert raised.value.filename == str(tmp_path / "file")
    assert names(tmp_path) == []


def test_a_folder_that_does_not_exist_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"), atomic_open(tmp_path / "missing" / "file"):
        raise AssertionError("the block must not run")


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_or_device_is_refused_and_stays(tmp_path, linked):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if linked:
        (tmp_path / "link").symlink_to(pipe)
    for path in ("/dev/null", tmp_path / "link" if linked else pipe):
        for refuse in (check_output_file, lambda path: write_json(path, 1)):
            with pytest.raises(ValueError, match=f"{path} is not a regular file; name a file"):
                refuse(path)
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


def test_json_survives_with_order_and_letters(tmp_path):
    value = {"z": 1, "a": [1.5, None, "\u4e2d\u6587"]}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert list(read_json(tmp_path / "x.json")) == ["z", "a"]
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert "\u4e2d\u6587" in text
    assert text.endswith("}\n")


def test_json_that_cannot_be_written_leaves_the_old_one(tmp_path):
    write_json(tmp_path / "x.json", [1])
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", [object()])
    assert read_json(tmp_path / "x.json") == [1]
    assert names(tmp_path) == ["x.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_damaged_json_is_named(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    advice = "if a step of mlsm wrote it, delete it and run that step again"
    pattern = rf"^{re.escape(str(path))} is not valid JSON \(.+\); {advice}$"
    with pytest.raises(ValueError, match=pattern):
        read_json(path)


def test_a_filled_folder_appears_and_keeps_what_else_it_held(tmp_path):
    folder = tmp_path / "deep" / "folder"
    folder.mkdir(parents=True)
    (folder / "kept").write_text("kept")
    (folder / "replaced").write_text("old")
    with atomic_directory(folder) as temporary:
        (temporary / "replaced").write_text("new")
        (temporary / "added").write_text("added")
        assert names(folder) == ["kept", "replaced"]
        assert (folder / "replaced").read_text() == "old"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "kept": "kept", "replaced": "new", "added": "added",
    }  # fmt: skip
    assert names(folder.parent) == ["folder"]


def test_a_folder_that_fails_is_absent_or_unchanged(tmp_path):
    def failing(path):
        with atomic_directory(path) as temporary:
            (temporary / "file").write_text("half")
            raise RuntimeError

    for path in (tmp_path / "new", tmp_path / "old"):
        if path.name == "old":
            path.mkdir()
            (path / "file").write_text("old")
        with pytest.raises(RuntimeError):
            failing(path)
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old" / "file").read_text() == "old"


def test_fingerprint_is_that_of_the_contents_in_order(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (3 << 20))
    (tmp_path / "b").write_bytes(b"y")
    expected = hashlib.sha256(b"x" * (3 << 20) + b"y").hexdigest()
    assert sha256_of_files(tmp_path / "a", str(tmp_path / "b")) == expected
    assert sha256_of_files(tmp_path / "b", tmp_path / "a") != expected
    assert sha256_of_files() == hashlib.sha256().hexdigest()
    with pytest.raises(FileNotFoundError, match="absent"):
        sha256_of_files(tmp_path / "absent")


def test_two_writers_of_one_file_in_one_process_do_not_meet(tmp_path):
    """Machines that share a disk can share process numbers, so that a name must hold more than that."""
    with atomic_open(tmp_path / "file") as first:
        with atomic_open(tmp_path / "file") as second:
            assert len(names(tmp_path)) == 2
            second.write(b"second")
        first.write(b"first")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert names(tmp_path) == ["file"]


def test_temporary_names_are_drawn_and_can_be_told_from_other_files(tmp_path):
    found = {temporary_path(tmp_path / "x.npy") for _ in range(50)}
    assert len(found) == 50
    assert all(re.fullmatch(r"\.x\.npy\.[0-9a-f]{32}\.tmp", path.name) for path in found)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_of_a_plain_open(tmp_path, umask):
    before = os.umask(umask)
    try:
        with open(tmp_path / "plain", "wb"):
            pass
        with atomic_open(tmp_path / "opened") as file:
            file.write(b"x")
        write_json(tmp_path / "json", 1)
        write_npy(tmp_path / "npy", np.zeros(1))
        write_json(tmp_path / "first", 1, keep_existing=True)
        copy_file(tmp_path / "plain", tmp_path / "copy")
    finally:
        os.umask(before)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    assert len(names(tmp_path)) == 6


@pytest.mark.parametrize("write", [write_json, lambda path, value: write_npy(path, np.array(value))])
def test_what_is_being_written_is_not_a_leftover(tmp_path, monkeypatch, write):
    real_replace = os.replace

    def after_another_process_sealed(source, target):
        remove_leftovers(tmp_path)
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", after_another_process_sealed)
    write(tmp_path / "file", [1, 2])
    assert names(tmp_path) == ["file"]
    with atomic_directory(tmp_path / "folder") as folder:
        remove_leftovers(tmp_path)
        (folder / "x").touch()
    assert names(tmp_path) == ["file", "folder"]


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    real_flock, calls = fcntl.flock, []

    def after_another_process_tidied(descriptor, operation):
        calls.append(operation)
        if len(calls) == 1:
            remove_leftovers(tmp_path)
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_another_process_tidied)
    with atomic_open(tmp_path / "file") as file:
        file.write(b"x")
    assert names(tmp_path) == ["file"]
    assert len(calls) == 3  # this file, the one who tidies, the file again


def test_the_first_plan_wins_and_the_last_file(tmp_path, monkeypatch):
    real_link = os.link

    def after_another_process_was_faster(source, target):
        remove_leftovers(tmp_path)
        real_link(source, target)

    monkeypatch.setattr(os, "link", after_another_process_was_faster)
    write_json(tmp_path / "plan.json", {"a": 1}, keep_existing=True)
    write_json(tmp_path / "plan.json", {"a": 2}, keep_existing=True)
    assert read_json(tmp_path / "plan.json") == {"a": 1}
    write_json(tmp_path / "plan.json", {"a": 2})
    assert read_json(tmp_path / "plan.json") == {"a": 2}
    assert names(tmp_path) == ["plan.json"]


def test_leftovers_are_recognized_by_their_names(tmp_path):
    random = "0123456789abcdef" * 2
    for name in (f".x.{random}.tmp", ".y.tmp", "z.tmp", ".hidden", f"x.{random}.tmp", ".x.y.z.tmp"):
        (tmp_path / name).write_text("x")
    for name in (f".folder.{random}.tmp", ".folder.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inside").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".folder.tmp", ".hidden", ".x.y.z.tmp", ".y.tmp", f"x.{random}.tmp", "z.tmp"]
    remove_leftovers(tmp_path / "absent")


def test_nothing_is_removed_where_there_are_no_locks(tmp_path, monkeypatch):
    def without_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    leftover = temporary_path(tmp_path / "x")
    leftover.touch()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    write_json(tmp_path / "file", 1)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([leftover.name, "file"])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from mlsm_plugin.core.files.atomic_files import atomic_directory, atomic_open\n"
        "with atomic_open(sys.argv[1]) as file, atomic_directory(sys.argv[2]) as folder:\n"
        "    file.write(b'half'), (folder / 'half').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "file", tmp_path / "folder"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    write_json(tmp_path / "file", 1)
    assert names(tmp_path) == ["file"]


def test_links_stay_and_their_targets_are_written(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    write_json(tmp_path / "link", 1)
    write_json(tmp_path / "link", 2)
    with atomic_directory(tmp_path / "folder") as temporary:
        (temporary / "new").touch()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder").is_symlink()
    assert read_json(tmp_path / "real" / "file") == 2
    assert names(tmp_path / "real") == ["file", "new"]


def test_an_old_folder_inside_is_replaced_as_a_whole(tmp_path):
    for name in ("kept", "replaced"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "old").touch()
    with atomic_directory(tmp_path / "out") as temporary:
        (temporary / "replaced").mkdir()
        (temporary / "replaced" / "new").touch()
    assert names(tmp_path / "out" / "kept") == ["old"]
    assert names(tmp_path / "out" / "replaced") == ["new"]


def test_a_copy_is_whole_and_a_missing_source_is_named(tmp_path):
    (tmp_path / "source").write_bytes(b"x" * (3 << 20))
    copy_file(tmp_path / "source", str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == b"x" * (3 << 20)
    with pytest.raises(FileNotFoundError, match="absent"):
        copy_file(tmp_path / "absent", tmp_path / "target")
    assert names(tmp_path) == ["source", "target"]


def test_json_that_is_there_already_is_not_written_again(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})
    before = (tmp_path / "x.json").stat()
    write_json(tmp_path / "x.json", {"a": 1})
    after = (tmp_path / "x.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_sampled_hash_tells_files_of_other_sizes_and_beginnings(tmp_path: Path) -> None:
    sizes = (0, 10, (1 << 20) + 1)
    contents = [b"\0" * size for size in sizes]
    hashes = set()
    for content in [*contents, *(content[:-1] + b"x" for content in contents[1:]), b"y" + contents[2][1:]]:
        (tmp_path / "file").write_bytes(content)
        hashes.add(sampled_sha256(tmp_path / "file"))
    assert len(hashes) == 6
    assert sampled_sha256(tmp_path / "file") in hashes


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    read = []

    def digest() -> str:
        read.append(path.read_text(encoding="utf-8"))
        return read[-1]

    path.write_text("one", encoding="utf-8")
    assert [remembered_digest("test", [path], digest) for _ in range(2)] == ["one", "one"]
    assert read == ["one", "one"]  # it has just changed, and could change again within the same time of change
    monkeypatch.setattr(atomic_files, "STABLE_NS", 0)
    assert [remembered_digest("test", [path], digest) for _ in range(2)] == ["one", "one"]
    assert len(read) == 3
    path.write_text("two", encoding="utf-8")
    os.utime(path, ns=(1, 1))  # a time of change that somebody sets does not hide it
    assert remembered_digest("test", [path], digest) == "two"
