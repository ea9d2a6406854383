"""Sequences of ids: every kind of input gives the same positions and the same fingerprint; damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlsm_plugin.huggingface.token_sequences import TokenSequences

ROWS = [[2, 7, 9, 3], [2, 8, 8, 3], [2, 5, 0, 0]]


def kinds(rows: list[list[int]], folder: Path) -> dict[str, Any]:
    """The same rows, of one length, in each kind of input."""
    array = np.array(rows, np.int32)
    np.save(folder / "rows.npy", array)
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": rows, "label": [0] * len(rows)})
    dataset.save_to_disk(folder / "dataset")
    TokenSequences.write(folder / "own", rows)
    return {
        **{"list": rows, "arrays": [np.array(row) for row in rows], "array": array, "int64": array.astype(np.int64)},
        **{"map": np.load(folder / "rows.npy", mmap_mode="r"), "npy": folder / "rows.npy", "dataset": dataset},
        **{
            "column": dataset["input_ids"],
            "saved": folder / "dataset",
            "own": folder / "own",
            "name": str(folder / "own"),
        },
    }


def test_each_kind_holds_the_same(tmp_path: Path) -> None:
    opened = {name: TokenSequences(given) for name, given in kinds(ROWS, tmp_path).items()}
    assert {sequences.fingerprint for sequences in opened.values()} == {opened["list"].fingerprint}
    for sequences in opened.values():
        assert [row.tolist() for row in sequences] == ROWS
        assert sequences.starts.tolist() == [0, 4, 8, 12]
        assert (len(sequences), sequences.num_tokens, sequences.largest_id) == (3, 12, 9)
        assert sequences[1].dtype == np.int64


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("rows") / "own"
    if not any(rows):
        with pytest.raises(ValueError, match="has no token"):
            TokenSequences.write(folder, rows)
        assert not folder.exists()
        return
    written = TokenSequences.write(folder, iter(rows))
    assert [row.tolist() for row in written] == rows
    assert written.fingerprint == TokenSequences(rows).fingerprint
    assert written.largest_id == max(token for row in rows for token in row)


def test_order_lengths_and_ids_are_in_the_fingerprint() -> None:
    rows = [[1, 2], [3]]
    others = [[[3], [1, 2]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [4]], [[1, 2], [3], []]]
    assert len({TokenSequences(found).fingerprint for found in (rows, *others)}) == 6


def test_about_is_kept_and_checked(tmp_path: Path) -> None:
    TokenSequences.write(tmp_path / "own", ROWS, about={"tokenizer": "abc"})
    assert TokenSequences(tmp_path / "own").about == {"tokenizer": "abc"}
    assert TokenSequences(ROWS).about == {}
    (tmp_path / "own" / "meta.json").write_text(json.dumps({"tokenizer": 3}))
    with pytest.raises(ValueError, match=r"own/meta.json"):
        TokenSequences(tmp_path / "own")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2], [1, -2]], "sequence 1 does not consist of token ids"),
        ([[1.5]], "sequence 0 does not consist"),
        ([[[1]]], "sequence 0 does not consist"),
        ([[2**31]], "sequence 0 does not consist"),
        ([["a"]], "sequence 0 does not consist"),
        ([[1], 2], "sequence 1 does not consist"),
        ([None], "sequence 0 does not consist"),
        (np.arange(3), "sequence 0 does not consist"),
        ([], "has no token"),
        ([[], []], "has no token"),
    ],
)
def test_what_are_no_ids_is_refused(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _ = TokenSequences(rows).fingerprint
    with pytest.raises(ValueError, match=message):
        TokenSequences.write(tmp_path / "own", rows)
    assert not list(tmp_path.iterdir())


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(ValueError, match=str(path.name)) as error:
            _ = TokenSequences(path).fingerprint
        return str(error.value)

    assert "does not exist; pass a folder that `mlsm binarize --format sequences` wrote" in refused(tmp_path / "absent")
    (tmp_path / "text.txt").write_text("text")
    assert "is not an .npy file" in refused(tmp_path / "text.txt")
    np.save(tmp_path / "flat.npy", np.arange(5))
    assert "has an array of shape (5,), and 2 dimensions are needed" in refused(tmp_path / "flat.npy")
    (tmp_path / "empty").mkdir()
    assert "holds no token sequences" in refused(tmp_path / "empty")
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "splits")
    assert "holds several splits; pass the folder of one of them (train)" in refused(tmp_path / "splits")
    dataset.save_to_disk(tmp_path / "raw")
    with pytest.raises(ValueError, match="no column input_ids, only text; tokenize it first"):
        TokenSequences(tmp_path / "raw")
    (tmp_path / "raw" / "dataset_info.json").write_text("{")
    assert "cannot be read" in refused(tmp_path / "raw")


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    TokenSequences.write(tmp_path / "own", ROWS)
    content = (tmp_path / "own" / "ids.npy").read_bytes()
    (tmp_path / "own" / "ids.npy").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"ids.npy is missing or damaged"):
        TokenSequences(tmp_path / "own")
    (tmp_path / "own" / "ids.npy").write_bytes(content)
    np.save(tmp_path / "own" / "starts.npy", np.array([0, 9, 4, 12]))
    with pytest.raises(ValueError, match="is damaged; write them again"):
        TokenSequences(tmp_path / "own")


def test_a_part_is_a_corpus_of_its_own(tmp_path: Path) -> None:
    ids = [[1, 2, 3], [4, 5], [6], [7, 8]]
    written = TokenSequences.write(tmp_path / "all", ids, about={"max_length": 3})
    for whole in (TokenSequences(ids), written):
        part = whole.part(1, 3)
        assert part.fingerprint == TokenSequences(ids[1:3]).fingerprint
        assert (len(part), part.starts.tolist(), part[1].tolist()) == (2, [0, 2, 3], [6])
        assert part.about == whole.about
        assert part.part(1, 2).fingerprint == TokenSequences([[6]]).fingerprint
