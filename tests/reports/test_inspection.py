"""``mlsm inspect``: the page of the atoms of a coded split, found from a dataset, its parent or a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockSettings
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split
from mlsm_plugin.reports.inspection import inspect
from tests.conftest import failing_mlsm, mlsm
from tests.core.coding.toy_coder import ToyCoder
from tests.reports.test_latent_report import atoms_of
from tests.tiny_models import TinyData

Capture = pytest.CaptureFixture[str]


def test_page_shows_the_atoms_and_facts(coded: Path, tmp_path: Path, capsys: Capture) -> None:
    mlsm("inspect", coded, "--output", tmp_path / "page.html")
    codes = CodeStore(str(coded / "data-bin" / "train.codes"))
    used = np.unique(codes.rows(0, len(codes)).indices)
    assert capsys.readouterr().out == f"32 atoms, {32 - len(used)} of them dead here: {tmp_path / 'page.html'}\n"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for fact in (f"{len(codes):,}", "data-bin, train", "toy", "0.2500", codes.meta["fingerprints"]["auxiliary"][:12]):
        assert fact in page


def test_page_has_the_models_name_and_the_nearest_atoms_of_its_dictionary(
    tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    data = tiny.copy(tmp_path / "data-bin")
    for name, seed in (("dictionary", 0), ("other", 1)):
        atoms = np.random.default_rng(seed).normal(size=(20, 32)).astype(np.float32)
        atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
        AtomDictionary(atoms, {"lambda": 0.05, "layer": 1}).save(tmp_path / name)
    coder = load_coder(tmp_path / "dictionary")
    settings = CodingSettings(layer=1, blocks=BlockSettings(24))
    encode_split(data, "train", auxiliary=tiny.model, coder=coder, settings=settings)
    mlsm("inspect", data, "--output", tmp_path / "page.html")  # finds the dictionary beside the data
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"{tiny.model.parent.name}/{tiny.model.name} (SHA-256 " in page
    assert sum(bool(atom["near"]) for atom in atoms_of(page)) == 20
    (tmp_path / "dictionary").rename(tmp_path / "moved")
    mlsm("inspect", data, "--output", tmp_path / "page.html")
    assert not any(atom["near"] for atom in atoms_of((tmp_path / "page.html").read_text(encoding="utf-8")))
    mlsm("inspect", data, "--output", tmp_path / "page.html", "--dictionary", tmp_path / "moved")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    capsys.readouterr()
    line = failing_mlsm(capsys, "inspect", data, "--output", tmp_path / "page.html", "--dictionary", tmp_path / "other")
    assert "the codes are over another dictionary than" in line


def test_page_has_the_names_that_are_passed(coded: Path, tmp_path: Path, capsys: Capture) -> None:
    names = tmp_path / "names.json"
    names.write_text('{"3": "months of the year"}')
    page = tmp_path / "page.html"
    mlsm("inspect", coded, "--output", page, "--names", names)
    atoms = atoms_of(page.read_text(encoding="utf-8"))
    assert [atom["called"] for atom in atoms if atom["called"]] == ["months of the year"]
    assert atoms[3]["called"]
    names.write_text('{"32": "rain"}')
    assert "names atom 32, but there are only 32" in failing_mlsm(capsys, "inspect", coded, "--names", names)
    assert "and also an input" in failing_mlsm(capsys, "inspect", coded, "--names", names, "--output", names)


def test_page_says_how_many_tokens_were_read(coded: Path, tmp_path: Path) -> None:
    count = len(CodeStore(coded / "data-bin" / "train.codes"))
    for read, fact in ((300, f"the first 300 of {count:,}"), (count, f"<td>{count:,}</td>")):
        inspect(coded, tmp_path / "page.html", max_tokens=read)
        assert fact in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_non_zeros_are_those_of_a_coded_token(tiny: TinyData, tmp_path: Path) -> None:
    settings = CodingSettings(layer=1, blocks=BlockSettings(24), coverage=0.2)
    data = tiny.copy(tmp_path / "data-bin")
    encode_split(data, "train", auxiliary=tiny.model, coder=ToyCoder(), settings=settings)
    mlsm("inspect", data, "--output", tmp_path / "page.html")
    store = CodeStore(str(data / "train.codes"))
    nonzeros = np.diff(store.rows(0, len(store)).indptr)
    assert nonzeros.mean() < 0.5 < 1.9 < (expected := nonzeros[nonzeros > 0].mean()) <= 2
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.search(rf"mean non-zeros per coded token\W[^.]*\b{expected:.1f}\b", page)


def test_what_cannot_be_shown_is_one_line(coded: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("inspect", coded, "--output", tmp_path / "page.html")
    assert "--max-tokens must be positive, got 0" in failing_mlsm(capsys, *words, "--max-tokens", 0)
    assert "valid.codes holds no meta.json" in failing_mlsm(capsys, *words, "--split", "valid")
    assert list(tmp_path.iterdir()) == []


def judged(coded: Path, path: Path, **changes: Any) -> Path:
    """What ``mlsm evaluate dictionary`` writes, of the dictionary of these codes."""
    fingerprint = CodeStore(str(coded / "data-bin" / "train.codes")).meta["fingerprints"]["dictionary"]
    record = {
        "dictionary": {"fingerprint": fingerprint},
        "layer": 1,
        "split": "valid",
        "reconstruction": {"explained_variance": 0.8765432, "cossim": None, "tokens": 10},
        "loss": {"ce_loss_with_sae": 1.2345678, "ce_loss_score": 0.5, "ablation": "zero"},
    }
    path.write_text(json.dumps({**record, **changes}), encoding="utf-8")
    return path


def test_page_shows_the_figures_of_an_evaluation(coded: Path, tmp_path: Path) -> None:
    for loss in (True, False):
        file = judged(coded, tmp_path / "quality.json", **({} if loss else {"loss": None}))
        mlsm("inspect", coded, "--output", tmp_path / "page.html", "--quality", file)
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        for label in ("explained_variance (valid)", "0.8765", "cossim (valid)", "not defined"):
            assert label in page
        assert ("ce_loss_score (valid)" in page, "1.235" in page) == (loss, loss)


def test_another_file_than_an_evaluation_is_one_line(coded: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "train.txt").write_text("text", encoding="utf-8")
    words = ("inspect", coded, "--output", tmp_path / "page.html", "--quality")
    for file in (tmp_path / "train.txt", coded / "data-bin" / "train.codes" / "meta.json"):
        line = failing_mlsm(capsys, *words, file)
        assert f"{file} is not a file that `mlsm evaluate dictionary --output` wrote" in line
        assert "delete" not in line


def test_figures_of_another_dictionary_are_refused(coded: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("inspect", coded, "--output", tmp_path / "page.html", "--quality")
    other = judged(coded, tmp_path / "other.json", dictionary={"fingerprint": "1" * 64})
    assert "other.json judges another dictionary (SHA-256 111111111111) than" in failing_mlsm(capsys, *words, other)
    own = json.loads(judged(coded, tmp_path / "own.json").read_text())["dictionary"]
    sparser = judged(coded, tmp_path / "sparser.json", dictionary={**own, "lambda": 0.5})
    line = failing_mlsm(capsys, *words, sparser)
    assert "sparser.json judges codes of the same dictionary with lambda 0.5, but these have None; run" in line
    broken = judged(coded, tmp_path / "broken.json", reconstruction={})
    assert "broken.json is not a file that `mlsm" in failing_mlsm(capsys, *words, broken)
    assert "absent.json" in failing_mlsm(capsys, *words, tmp_path / "absent.json")
    assert not (tmp_path / "page.html").exists()
