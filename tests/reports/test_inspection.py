"""``mlsm inspect``: the page of the atoms of a coded split, found from a dataset, its parent or a run."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockSettings
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split
from mlsm_plugin.reports import inspection
from mlsm_plugin.reports.inspection import find_codes, summarize_split
from tests.conftest import failing_mlsm, mlsm
from tests.core.coding.toy_coder import ToyCoder
from tests.reports.test_latent_report import atoms_of
from tests.tiny_models import MASKED_LM, TinyData, save_untrained

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def coded(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a coded ``data-bin``."""
    root = tmp_path_factory.mktemp("coded")
    settings = CodingSettings(layer=1, blocks=BlockSettings(24))
    coder = ToyCoder(health={"unused_atoms": 3, "reconstruction_error": 0.25})
    encode_split(tiny.copy(root / "data-bin"), "train", auxiliary=tiny.model, coder=coder, settings=settings)
    return root


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
    assert f"{tiny.model} (SHA-256 " in page
    assert sum(bool(atom["near"]) for atom in atoms_of(page)) == 20
    (tmp_path / "dictionary").rename(tmp_path / "moved")
    mlsm("inspect", data, "--output", tmp_path / "page.html")
    assert not any(atom["near"] for atom in atoms_of((tmp_path / "page.html").read_text(encoding="utf-8")))
    mlsm("inspect", data, "--output", tmp_path / "page.html", "--dictionary", tmp_path / "moved")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    capsys.readouterr()
    line = failing_mlsm(capsys, "inspect", data, "--output", tmp_path / "page.html", "--dictionary", tmp_path / "other")
    assert "the codes are over another dictionary than" in line


def test_page_says_how_many_tokens_were_read(coded: Path, tmp_path: Path) -> None:
    count = len(CodeStore(coded / "data-bin" / "train.codes"))
    for read, fact in ((300, f"the first 300 of {count:,}"), (count, f"<td>{count:,}</td>")):
        mlsm("inspect", coded, "--output", tmp_path / "page.html", "--max-tokens", read)
        assert fact in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_summaries_are_over_the_first_tokens(coded: Path) -> None:
    whole, store = summarize_split(coded / "data-bin", "train", coded / "data-bin", max_tokens=10**9)
    part, _ = summarize_split(coded / "data-bin", "train", coded / "data-bin", max_tokens=300)
    dense = store.rows(0, len(store)).toarray()
    coded_rows = dense.sum(axis=1) > 0
    expected = (dense[coded_rows] > 0).mean(axis=0)
    assert [summary.frequency for summary in whole] == pytest.approx(expected.tolist(), abs=0.02)
    assert [summary.frequency for summary in part] != [summary.frequency for summary in whole]


def test_fewer_tokens_are_read_without_a_progress_bar(coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = summarize_split(coded / "data-bin", "train", coded / "data-bin", max_tokens=300)
    silent = partial(inspection.Progress, disable=True)  # as with TQDM_DISABLE
    monkeypatch.setattr(inspection, "Progress", silent)
    found, _ = summarize_split(coded / "data-bin", "train", coded / "data-bin", max_tokens=300)
    assert [summary.frequency for summary in found] == [summary.frequency for summary in expected]


def test_dataset_is_found_from_where_it_is_and_from_a_run(coded: Path, tiny: TinyData, tmp_path: Path) -> None:
    data = coded / "data-bin"
    assert find_codes(data) == find_codes(coded) == (data, data)
    run = save_untrained(data, tmp_path / "run", **MASKED_LM).parent
    assert find_codes(run) == (data, data)
    gone = tiny.copy(tmp_path / "gone")
    lost = save_untrained(gone, tmp_path / "lost", **MASKED_LM).parent
    shutil.rmtree(gone)
    with pytest.raises(FileNotFoundError, match=re.escape(f"{lost} was trained on {gone}, which ")):
        find_codes(lost)
    with pytest.raises(FileNotFoundError, match=r"is neither a binarized dataset nor a run \(no train\.idx, no check"):
        find_codes(tmp_path)


def test_codes_of_another_folder_are_found(coded: Path, tmp_path: Path) -> None:
    data, codes = coded / "data-bin", tmp_path / "codes"
    shutil.copytree(data / "train.codes", codes / "train.codes")
    run = save_untrained(data, tmp_path / "run", "--latent-codes", codes).parent
    assert find_codes(run) == (data, codes)
    mlsm("inspect", data, "--codes", codes, "--output", tmp_path / "page.html")
    assert "atoms" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_codes_of_a_run_in_stages_are_those_of_its_last_stage(coded: Path, tmp_path: Path, capsys: Capture) -> None:
    data, run = coded / "data-bin", tmp_path / "run"
    save_untrained(data, run, **MASKED_LM)  # the best checkpoint may be of the first stage
    (run / "stages.json").write_text("{}")
    assert "no codes yet; the second stage begins with them" in failing_mlsm(capsys, "inspect", run)
    for stage in ("stage-9", "stage-10"):
        (run / stage / "dictionary").mkdir(parents=True)
        (run / stage / "dictionary" / "meta.json").write_text("{}")
    problem = failing_mlsm(capsys, "inspect", run)
    last = run / "stage-10"
    command = f"`mlsm encode {data} --auxiliary {last / 'model.pt'} --dictionary {last / 'dictionary'} --output DIR`"
    assert f"{run} has no stored codes (--latent-source online stores none); make some with {command}" in problem
    assert find_codes(run, tmp_path) == (data, tmp_path)
    shutil.copytree(data / "train.codes", run / "stage-9" / "train.codes")
    assert find_codes(run) == (data, run / "stage-9")
    shutil.copytree(data / "train.codes", last / "train.codes")
    assert find_codes(run) == (data, last)


def predicting(checkpoint: Path, dictionary: str) -> None:
    """Let a checkpoint say over which dictionary the codes are that its model predicts."""
    state = torch.load(checkpoint, weights_only=True)
    torch.save({**state, "task_state": {"codes_over": dictionary}}, checkpoint)


def test_codes_over_another_dictionary_than_the_run_predicts_are_refused(
    coded: Path, tmp_path: Path, capsys: Capture
) -> None:
    data, run = coded / "data-bin", tmp_path / "run"
    last = save_untrained(data, run, **MASKED_LM)
    assert find_codes(run) == (data, data)  # a run of an older version
    best = shutil.copy(last, run / "checkpoint_best.pt")
    predicting(best, "a" * 64)
    problem = failing_mlsm(capsys, "inspect", run, "--output", tmp_path / "page.html")
    assert f"the codes in {data / 'train.codes'} are over another dictionary (SHA-256 {'0' * 12}) than those" in problem
    assert f"that {run} predicts ({'a' * 12}); pass --codes with those" in problem
    assert find_codes(run, split="valid") == (data, data)  # has no codes, which is said later
    (run / "stages.json").write_text("{}")
    shutil.copytree(data / "train.codes", run / "stage-1" / "train.codes")
    newest = run / "checkpoint_1_5.pt"
    history = [{**torch.load(last, weights_only=True)["optimizer_history"][0], "num_updates": 5}]
    torch.save({**torch.load(last, weights_only=True), "optimizer_history": history}, newest)
    predicting(newest, "0" * 64)  # the best checkpoint is of an earlier stage
    assert find_codes(run) == (data, run / "stage-1")
    predicting(newest, "b" * 64)
    with pytest.raises(ValueError, match=r"predicts \(b{12}\)"):
        find_codes(run, data)


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
