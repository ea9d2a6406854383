"""Reading raw text: what counts as a line, and errors that name the file and the line."""

from __future__ import annotations

import gzip

import pytest

from mlsm_plugin.tokenization import text_files
from mlsm_plugin.tokenization.text_files import check_text_files, numbered_lines, read_lines, read_text


def test_lines_end_at_newlines_only_and_are_stripped(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeff one\x85two\u2028three \r\n \t\u00a0\nfour".encode())
    assert list(read_lines(path)) == ["one\x85two\u2028three", "", "four"]


@pytest.mark.parametrize("name", ["text.gz", "text"])
def test_gzip_is_recognized_by_content_and_reported_by_compressed_bytes(tmp_path, name):
    path = tmp_path / name
    lines = [f"line {i} é" for i in range(5000)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    reported = []
    assert list(read_lines(path, reported.append)) == lines
    assert sum(reported) == path.stat().st_size == check_text_files([path])
    assert len(reported) > 1


def test_two_files_are_two_documents(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"{name}1\n{name}2\n")
    assert list(read_text([tmp_path / "a", tmp_path / "b"])) == ["a1", "a2", "", "b1", "b2"]


def test_bytes_that_are_not_utf8_are_named_with_file_and_line(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"good\nbad \xe9t\xe9\n")
    with pytest.raises(ValueError, match=r"latin1\.txt:2: not UTF-8 \(byte 0xe9 at column 5\)"):
        list(read_lines(path))


def test_damaged_gzip(tmp_path):
    path = tmp_path / "cut.gz"
    whole = gzip.compress("\n".join(f"line {i * i}" for i in range(9000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.gz: damaged gzip file, from line \d+ on"):
        list(read_lines(path))
    path.write_bytes(whole[:50] + b"\xff" * 50 + whole[100:])
    with pytest.raises(ValueError, match="damaged gzip file"):
        list(read_lines(path))


def test_empty_blank_and_missing_files(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text(" \n\n\t\n")
    with pytest.raises(ValueError, match="empty is empty"):
        check_text_files([tmp_path / "empty"])
    with pytest.raises(ValueError, match="blank holds no text"):
        list(read_lines(tmp_path / "blank"))
    with pytest.raises(FileNotFoundError):
        check_text_files([tmp_path / "missing"])
    with pytest.raises(IsADirectoryError):
        check_text_files([tmp_path])
    with pytest.raises(ValueError, match="is not a regular file"):
        check_text_files(["/dev/null"])
    with pytest.raises(ValueError, match="no text file"):
        check_text_files([])


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "one_line"
    path.write_bytes(b"ok\n" + b"a " * (1 << 20))
    with pytest.raises(ValueError, match=r"one_line:2: longer than 1 MiB"):
        list(read_lines(path))


def test_numbered_lines_keep_their_whitespace(tmp_path):
    path = tmp_path / "file"
    path.write_bytes("\ufeff\tone \r\n\n \t\n two\u2028half\x0b\n".encode())
    assert list(numbered_lines(path)) == [(1, "\tone "), (4, " two\u2028half\x0b")]
    path.write_bytes(b"")
    assert list(numbered_lines(path)) == []
    path.write_bytes(b"good\n\xff\n")
    with pytest.raises(ValueError, match="file:2: not UTF-8"):
        list(numbered_lines(path))
