from __future__ import annotations

import hashlib
import os

from mlsm_plugin.files import fingerprints
from mlsm_plugin.files.fingerprints import fingerprints_of, first_change


def test_contents_count_and_not_times(tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    files = [tmp_path / "one", tmp_path / "folder" / "two", tmp_path / "folder" / "deep" / "three"]
    for file in files:
        file.write_text(file.name)
    (tmp_path / "folder" / ".hidden").touch()
    found = fingerprints_of([files[0], tmp_path / "folder", tmp_path / "absent"])
    assert list(found) == [str(files[0]), str(files[2]), str(files[1])]
    assert found[str(files[0])]["sha256"] == hashlib.sha256(b"one").hexdigest()
    os.utime(files[0], ns=(1, 1))
    again = fingerprints_of([files[0], tmp_path / "folder"], found)
    assert first_change(found, again) is None
    files[1].write_text("owt")
    (tmp_path / "folder" / "more").touch()
    assert first_change(found, fingerprints_of([files[0], tmp_path / "folder"], found)) == str(files[1])
    files[1].unlink()
    assert first_change(found, fingerprints_of([files[0], tmp_path / "folder"], found)) == str(files[1])


def test_a_file_with_the_same_size_and_time_is_not_read_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    found = fingerprints_of([tmp_path / "file"])
    monkeypatch.setattr(fingerprints, "sha256_of_files", None)
    assert fingerprints_of([tmp_path / "file"], found) == found
