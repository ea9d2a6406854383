"""The comparison of targets from a teacher runs at toy size, and does not repeat what is done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.conftest import REPOSITORY
from tests.script_module import load_script
from tests.tiny_hf_models import make_model

compare = load_script("research/compare_teachers.py")
ATOMS = 40


class Finished(NamedTuple):
    """A comparison that has run."""

    command: list[str]
    output: Path
    printed: str


def run(words: list[str]) -> str:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def finished(
    english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, warm_python_in_module: Path
) -> Finished:
    """A comparison of toy size."""
    root = tmp_path_factory.mktemp("teachers")
    lines = english_text[0].read_text(encoding="utf-8").splitlines(keepends=True)
    (root / "text.txt").write_text("".join(lines[:300]), encoding="utf-8")
    (root / "valid.txt").write_text("".join(lines[300:600]), encoding="utf-8")
    teacher = make_model("bert", english_text[0], root / "teacher")
    rows = [f"{label}\t{text}\n" for label, text in (("good", "a fine name"), ("bad", "no value at all"))] * 10
    task = root / "task"
    task.mkdir()
    for name in ("train", "test"):
        (task / f"{name}.tsv").write_text("".join(rows), encoding="utf-8")
    pairs = [("the name was found", "the name were found"), ("a value is here", "a value are here")]
    pair_lines = [json.dumps({"sentence_good": good, "sentence_bad": bad, "UID": "verb"}) for good, bad in pairs]
    (root / "pairs.jsonl").write_text("\n".join(pair_lines), encoding="utf-8")
    words = ["research/compare_teachers.py", teacher, "--text", root / "text.txt", "--valid"]
    words += [root / "valid.txt", "--labelled", task / "train.tsv", task / "test.tsv", "--output", root / "out"]
    words += ["--student", "1x32", "--vocab-size", 300, "--max-length", 32, "--updates", 3, "--batch-size", 4]
    words += ["--layer", 1, "--atoms", ATOMS, "--k", 4, "--dictionary-tokens", 4000, "--lines", 12, "--epochs", 1]
    words += ["--pairs", root / "pairs.jsonl"]
    command = [*map(str, words)]
    return Finished(command, root / "out", run(command))


@pytest.mark.slow
def test_all_rows_are_trained_once_and_measured(finished: Finished) -> None:
    table = finished.printed
    output = finished.output
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    assert [*rows] == ["row", "---", *compare.ROWS]
    assert (output / "teachers.md").read_text(encoding="utf-8").strip() == table[table.index("| row") :].strip()
    figures = {name: json.loads((output / f"{name}-seed-1.json").read_text(encoding="utf-8")) for name in compare.ROWS}
    assert {entry["updates"] for name, entry in figures.items() if name != "mlm-time"} == {3}
    assert figures["mlm-time"]["updates"] > 3
    for name in compare.ROWS:
        head_is_trained = name not in ("mlsm", "sentence-vectors")
        assert ("bits/word" in figures[name]["measures"]) == head_is_trained
        pairs = output / f"{name}-seed-1-pairs.json"
        assert pairs.exists() == head_is_trained
        if head_is_trained:
            assert json.loads(pairs.read_text(encoding="utf-8"))["pairs"] in (0, 0.5, 1)
        scores = json.loads((output / f"{name}-seed-1-finetuned.json").read_text(encoding="utf-8"))
        assert 0 <= scores["task"] <= 1
    losses = {entry["log"][-1]["train_loss"] for entry in figures.values()}
    assert len(losses) == len(figures), "two rows were trained on the same targets"
    times = {path: path.stat().st_mtime_ns for path in output.glob("*.json")}
    assert run(finished.command).endswith(table[table.index("| row") :])
    assert {path: path.stat().st_mtime_ns for path in output.glob("*.json")} == times


@pytest.mark.slow
def test_controls_keep_what_they_promise(finished: Finished) -> None:
    output = finished.output
    text = TokenSequences(output / "tokens.auxiliary")
    ids = np.concatenate([text[number] for number in range(len(text))])
    stores = {name: CodeStore(output / f"{name}.codes") for name in ("codes", "exchanged-within-types", "type-mean")}
    codes = {name: store.rows(0, len(ids)).toarray() for name, store in stores.items()}
    coded = codes["codes"].any(axis=1)
    type_ids, counts = np.unique(ids[coded], return_counts=True)
    common = np.flatnonzero(coded & (ids == type_ids[counts.argmax()]))
    original = codes["codes"][common]
    exchanged = codes["exchanged-within-types"][common]
    assert not np.array_equal(original, exchanged)
    assert sorted(map(bytes, original > 0)) == sorted(map(bytes, exchanged > 0))  # weights are rounded again
    means = codes["type-mean"][common]
    assert (means == means[0]).all()
    np.testing.assert_allclose(means[0], original.mean(axis=0), atol=2e-3)
