"""Reading raw text: what counts as a line, and errors that name the file and the line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest

from mlsm_plugin.core.text import text_files
from mlsm_plugin.core.text.text_files import (
    check_text,
    check_text_files,
    is_json_lines,
    json_objects,
    numbered_lines,
    read_lines,
    read_text,
)


def test_lines_end_at_newlines_only_and_are_stripped(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeff one\x85two\u2028three \r\n \t\u00a0\nfour".encode())
    assert list(read_lines(path)) == ["one\x85two\u2028three", "", "four"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compression_is_recognized_by_content_and_reported_by_compressed_bytes(tmp_path, compress):
    path = tmp_path / "text"
    lines = [f"line {i} é {i * i}" for i in range(20_000)]
    path.write_bytes(compress("\n".join(lines).encode()))
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


@pytest.mark.parametrize(("compress", "kind"), [(bz2.compress, "bzip2"), (lzma.compress, "xz")])
def test_damaged_bzip2_and_xz(tmp_path, compress, kind):
    whole = compress("\n".join(f"line {i * i}" for i in range(9000)).encode())
    for damaged in (whole[: len(whole) // 2], whole[:50] + b"\xff" * 50 + whole[100:]):
        (tmp_path / "text").write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"text: damaged {kind} file, from line \d+ on"):
            list(read_lines(tmp_path / "text"))


@pytest.mark.parametrize(("first", "kind"), [(b"PK\x03\x04\x14", "zip"), (b"\x28\xb5\x2f\xfd\x04", "zstd")])
def test_other_compression_is_named(tmp_path, first, kind):
    (tmp_path / "text").write_bytes(first + bytes(100))
    with pytest.raises(ValueError, match=f"text is compressed with {kind}, which cannot be read; compress it with"):
        check_text_files([tmp_path / "text"])


def test_text_that_begins_like_a_compressed_file_is_text(tmp_path):
    (tmp_path / "text").write_text("BZh9 is how bzip2 begins.\nPK is a name.\n")
    assert list(read_lines(tmp_path / "text")) == ["BZh9 is how bzip2 begins.", "PK is a name."]


@pytest.mark.parametrize("content", [b"one\rtwo\rthree", b"one\rtwo\r\n", b"a\nb\none\rtwo\rthree\rfour\n", b"a\r" * 9])
@pytest.mark.parametrize("reader", [read_lines, numbered_lines])
def test_carriage_returns_between_lines_are_refused(tmp_path, content, reader):
    (tmp_path / "old_mac").write_bytes(content)
    with pytest.raises(ValueError, match=r"old_mac:\d: carriage returns .* tr '\\r' '\\n' < FILE > NEW_FILE"):
        list(reader(tmp_path / "old_mac"))


@pytest.mark.parametrize("content", [b"one\r\ntwo\r\n", b"one\r\r\ntwo", b"one\r", b"one\ntwo\nth\rree\n"])
def test_carriage_returns_before_newlines_and_rare_ones_are_whitespace(tmp_path, content):
    (tmp_path / "text").write_bytes(content)
    assert [line.replace("\r", "") for line in read_lines(tmp_path / "text")] == ["one", "two", "three"][
        : len(content) // 4
    ]


JSON_OBJECT = json.dumps({"text": "A sentence.\nAnother one.", "id": 7})


@pytest.mark.parametrize(
    "content",
    [
        f"{JSON_OBJECT}\n" * 5,
        f"\ufeff\n{JSON_OBJECT}\n\n  {JSON_OBJECT}\r\n{JSON_OBJECT}\nthe end",
        JSON_OBJECT,
        f"[{JSON_OBJECT}, {JSON_OBJECT}]\n",
    ],
)
def test_json_lines_are_not_text(tmp_path, content):
    (tmp_path / "lines").write_text(content, encoding="utf-8")
    for read in (read_lines, numbered_lines, lambda path: [check_text_files([path])]):
        with pytest.raises(ValueError, match=r"lines holds JSON lines, not text; take the text out .*: jq -r '\.text"):
            list(read(tmp_path / "lines"))
    lines = [line for _, line in numbered_lines(tmp_path / "lines", json_lines=True)]
    assert lines == [line.rstrip("\r") for line in content.lstrip("\ufeff").split("\n") if line]


@pytest.mark.parametrize("name", ["a.csv", "a.TSV.gz", "a.csv.xz"])
def test_tables_are_not_text(tmp_path, name):
    (tmp_path / name).write_text("text,label\nOne sentence.,1\n", encoding="utf-8")
    for read in (read_lines, lambda path: [check_text_files([path])]):
        with pytest.raises(ValueError, match=r"is a table, .*; take the column of text out of it"):
            list(read(tmp_path / name))
    (tmp_path / "a.csv.txt").write_text("a,b\n", encoding="utf-8")
    assert list(read_lines(tmp_path / "a.csv.txt")) == ["a,b"]


@pytest.mark.parametrize(
    "content",
    [
        f"{JSON_OBJECT}\n{JSON_OBJECT}\nand this is how it ends",
        "{}\n{}\n{}\n{}",
        "[1]\n[2]\n[3]\n",
        '{"broken": \n' * 4,
        "[" * 100_000,
        '"one"\n"two"\n"three"\n4\nnull',
    ],
)
def test_text_about_json_is_text(tmp_path, content):
    (tmp_path / "text").write_text(content, encoding="utf-8")
    assert list(read_lines(tmp_path / "text")) == [line.strip() for line in content.rstrip("\n").split("\n")]


ENGLISH, RUSSIAN = (
    "The name is bound.\nIt is a value.\n",
    "\u0418\u043c\u044f\u0441\u0432\u044f\u0437\u0430\u043d\u043e",
)
NUL, CONTROL = r":1: a NUL byte at column \d+, .* iconv -f UTF-16LE", r":1: \d+ of \d+ bytes are control characters"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ENGLISH.encode("utf-16-le"), NUL),
        (ENGLISH.encode("utf-16-be"), NUL),
        (ENGLISH.encode("utf-32-le"), NUL),
        (RUSSIAN.encode("utf-16-le"), CONTROL),
        (RUSSIAN.encode("utf-16-be"), CONTROL),
        (b"one\0two\nthree\n", NUL),
        (bytes(range(1, 0x20)), CONTROL),
        (b"\x7fELF\x02\x01\x01\0\0", NUL),
        (b"<!DOCTYPE html>\n<html><body>A text.</body></html>\n", "begins as an HTML page, .* take the text out of it"),
        (b"\n  <!doctype HTML PUBLIC '-//W3C//DTD HTML 4.01//EN'>\n", "begins as an HTML page"),
        (b"\xef\xbb\xbf<HTML lang='en'>\n", "begins as an HTML page"),
        (b"<?xml version='1.0'?>\n<text/>\n", "begins as XML"),
        (b"%PDF-1.4\nstream\n", "begins as a document in PDF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n", "LFS .* git lfs pull"),
        (b"/annex/objects/SHA256E-s12--00ff.txt\n", "begins as a pointer of git-annex .* git annex get"),
    ],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_what_is_no_text_is_refused_by_every_reader(tmp_path, content, message, compress):
    path = tmp_path / "text"
    path.write_bytes(compress(content))
    for read in (read_lines, numbered_lines, json_objects, lambda path: [check_text_files([path])]):
        with pytest.raises(ValueError, match=rf"text.*{message}"):
            list(read(path))


@pytest.mark.parametrize(
    "lines",
    [
        ["A page begins with <!DOCTYPE html>.", "<html> comes next.", "<?xml version='1.0'?> is for XML."],
        ["<htmlx>", "<p>One line of HTML, as text has it.</p>"],
        ["version https of git-lfs", "%PDF is how it begins"],
        ["\x1b[31mred\x1b[0m", "form\x0cfeed", "a bell \x07 rings, and a line is long enough for it"],
        ["\u0418\u043c\u044f", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u4e2d\u6587", "\u200b\u00ad"],
    ],
)
def test_text_about_other_kinds_of_files_is_text(tmp_path, lines):
    (tmp_path / "text").write_text("\n".join(lines), encoding="utf-8")
    assert list(read_lines(tmp_path / "text")) == lines


@pytest.mark.parametrize(
    ("text", "message"),
    [("a\ud83d b", r"at place 2 is U\+D83D"), ("\udcff", r"at place 1 is U\+DCFF"), ("a\0b", "has a NUL character")],
)
def test_strings_that_are_no_text_are_named(text, message):
    with pytest.raises(ValueError, match=f"^file, line 3 .*{message}"):
        check_text(text, "file, line 3")
    check_text("\U0001f600 \u200b", "file, line 3")


def test_the_first_lines_are_checked_before_hours_of_work(tmp_path):
    (tmp_path / "text").write_bytes(b"fine\n" * 50 + b"\xff\n")
    with pytest.raises(ValueError, match="text:51: not UTF-8"):
        check_text_files([tmp_path / "text"])


def test_empty_blank_and_missing_files(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text(" \n\n\t\n")
    with pytest.raises(ValueError, match="empty is empty"):
        check_text_files([tmp_path / "empty"])
    for read in (read_lines, lambda path: [check_text_files([path])]):
        with pytest.raises(ValueError, match="blank holds no text"):
            list(read(tmp_path / "blank"))
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


@pytest.mark.parametrize(
    ("name", "is_json"),
    [("a.jsonl", True), ("a.ndjson.gz", True), ("a.JSONL.xz", True), ("a.jsonl.txt", False), ("a.b.txt.gz", False)],
)
def test_json_lines_are_known_by_their_ending(name, is_json):
    assert is_json_lines(name) == is_json
