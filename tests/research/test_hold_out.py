"""Holding documents out of texts."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.script_module import load_script, runner_of

hold_out = load_script("research/hold_out.py")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    return runner_of(hold_out, monkeypatch)


def test_every_document_is_in_one_text_and_all_sources_in_both(run: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"a{i} one\na{i} two\n\n\n" for i in range(7)), encoding="utf-8")
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\nb0\n\nb1\n\nb2")
    assert run(tmp_path / "a.txt", tmp_path / "b.txt.gz", "--output", tmp_path / "out", "--every", 3) == 0
    train, held_out = ((tmp_path / "out" / name).read_text(encoding="utf-8") for name in hold_out.NAMES)
    assert held_out == "a0 one\na0 two\n\na3 one\na3 two\n\na6 one\na6 two\n\nb0\n\n"
    assert train == "".join(f"a{i} one\na{i} two\n\n" for i in (1, 2, 4, 5)) + "b1\n\nb2\n\n"


def test_inputs_are_not_overwritten(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(f"a{i}\n\n" for i in range(7))
    (tmp_path / "train.txt").write_text(text, encoding="utf-8")
    (tmp_path / "link.txt").symlink_to(tmp_path / "train.txt")
    for name in ("train.txt", "link.txt"):
        with pytest.raises(SystemExit):
            run(tmp_path / name, "--output", tmp_path, "--every", 3)
        assert f"{name} would be overwritten; choose another --output" in capsys.readouterr().err
    assert (tmp_path / "train.txt").read_text(encoding="utf-8") == text
    assert not (tmp_path / "held_out.txt").exists()


def test_gzip_is_recognized_by_its_bytes_and_damage_is_one_line(run: Callable[..., int], tmp_path: Path) -> None:
    packed = gzip.compress(b"  a\n\nb\n\nc\n")
    (tmp_path / "packed").write_bytes(packed)
    assert run(tmp_path / "packed", "--output", tmp_path / "out", "--every", 2) == 0
    assert (tmp_path / "out" / "held_out.txt").read_text(encoding="utf-8") == "  a\n\nc\n\n"
    (tmp_path / "packed").write_bytes(packed[:12] + b"\xff" + packed[13:])
    with pytest.raises(SystemExit, match=r"error: .*packed: damaged gzip file"):
        run(tmp_path / "packed", "--output", tmp_path / "new", "--every", 2)


def test_what_cannot_be_split_is_one_line_and_nothing_is_written(run: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only one\n", encoding="utf-8")
    (tmp_path / "bad.txt").write_bytes(b"\xff\n\n\xfe\n")
    (tmp_path / "bad.gz").write_bytes(b"no gzip")
    for words in (("a.txt",), ("absent.txt",), ("bad.txt",), ("bad.gz",), ("a.txt", "--every", 1)):
        with pytest.raises(SystemExit):
            run(tmp_path / words[0], "--output", tmp_path / "out", *words[1:])
        assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True
