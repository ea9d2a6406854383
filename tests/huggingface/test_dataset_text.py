"""Text in columns of files and datasets, as plain text with a blank line after each document."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from mlsm_plugin.huggingface.dataset_text import rows_of_dataset, rows_of_files, write_column

pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def cached_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def test_files_of_all_kinds_are_read_in_order(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    lines = '{"body": "one\\ntwo", "n": 1}\n{"body": "  ", "n": 2}\n{"body": "three", "n": 3}\n'
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.JSONL.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.csv").write_text('n,body\n1,"four, five"\n', encoding="utf-8")
    (tmp_path / "d.tsv").write_text("n\tbody\n1\tsix, seven\n", encoding="utf-8")
    parquet.write_table(pyarrow.table({"body": ["eight"]}), tmp_path / "e.parquet")
    files = [tmp_path / name for name in ("a.jsonl", "b.JSONL.gz", "c.csv", "d.tsv", "e.parquet")]
    assert write_column(rows_of_files(files), "body", tmp_path / "text.txt") == 7
    documents = "one\ntwo\n\nthree\n\n"
    expected = f"{documents}{documents}four, five\n\nsix, seven\n\neight\n\n"
    assert (tmp_path / "text.txt").read_text(encoding="utf-8") == expected


def test_rows_with_an_empty_cell_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text("n,text\n1,one\n2,\n3,three\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "four"}\n{"text": null}\n', encoding="utf-8")
    files = [tmp_path / "a.csv", tmp_path / "b.jsonl"]
    assert write_column(rows_of_files(files), "text", tmp_path / "text.txt") == 3
    assert (tmp_path / "text.txt").read_text(encoding="utf-8") == "one\n\nthree\n\nfour\n\n"
    assert "2 rows have nothing in the column text, and are left out" in caplog.text


def test_a_split_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(f'{{"text": "of {split}"}}\n', encoding="utf-8")
    assert list(rows_of_dataset(str(tmp_path / "data"), "test")) == [{"text": "of test"}]
    with pytest.raises(ValueError, match="cannot be read as a dataset: Bad split: dev"):
        list(rows_of_dataset(str(tmp_path / "data"), "dev"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"body": "x"}], "row 1 has no column text, only body; name one with --column"),
        ([{"text": None}], "no row has text in the column text"),
        ([{"text": 3}], "row 1 has int instead of text"),
        ([{"text": "a\0b"}], "row 1 has a NUL character"),
        ([{"text": " "}], "no row has text in the column text"),
        ([], "no row has text"),
    ],
)
def test_what_is_no_text_is_one_line_and_nothing_is_written(
    tmp_path: Path, rows: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_column(rows, "text", tmp_path / "text.txt")
    assert not list(tmp_path.glob("*.txt"))


@pytest.mark.parametrize("name", ["text.txt", "noending", "nowhere.jsonl"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"is not JSON lines, CSV or Parquet|cannot be read as a dataset"):
        list(rows_of_files([tmp_path / name]))
