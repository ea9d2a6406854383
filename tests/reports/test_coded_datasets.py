"""Which dataset and codes are shown, and what the summaries are over."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from mlsm_plugin.core.files.atomic_files import write_json
from mlsm_plugin.core.files.step_record import StepRecord
from mlsm_plugin.reports import coded_datasets
from mlsm_plugin.reports.coded_datasets import find_codes, property_names, summarize_split
from tests.conftest import failing_mlsm, mlsm
from tests.tiny_models import MASKED_LM, TinyData, save_untrained

Capture = pytest.CaptureFixture[str]


def test_summaries_are_over_the_first_tokens(coded: Path) -> None:
    whole, store = summarize_split(coded / "data-bin", "train", coded / "data-bin", max_tokens=10**9)
    part, _ = summarize_split(coded / "data-bin", "train", coded / "data-bin", max_tokens=300)
    dense = store.rows(0, len(store)).toarray()
    for summaries, rows in ((whole, dense), (part, dense[:300])):
        coded_rows = rows.sum(axis=1) > 0
        expected = (rows[coded_rows] > 0).mean(axis=0)
        assert [summary.frequency for summary in summaries] == pytest.approx(expected.tolist(), abs=0.02)
    assert [summary.frequency for summary in part] != [summary.frequency for summary in whole]


def test_properties_are_named_by_words(coded: Path) -> None:
    names = property_names(coded / "data-bin")
    summaries, _ = summarize_split(coded / "data-bin", "train", coded / "data-bin", max_tokens=200_000)
    assert [name.split(", ") for name in names if name] == [
        [piece.replace("\u2581", "") for piece in summary.label] for summary in summaries if summary.label
    ]
    assert len(names) == len(summaries)
    assert sum(map(bool, names)) > 4


def test_fewer_tokens_are_read_without_a_progress_bar(coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = summarize_split(coded / "data-bin", "train", coded / "data-bin", max_tokens=300)
    silent = partial(coded_datasets.Progress, disable=True)  # as with TQDM_DISABLE
    monkeypatch.setattr(coded_datasets, "Progress", silent)
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
    StepRecord(run / "steps.json").keep_settings("stages", {"stages": [20]}, "")
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


def test_atoms_of_another_dictionary_raise_no_tokens(coded: Path, tmp_path: Path) -> None:
    data = coded / "data-bin"
    run = tmp_path / "run"
    checkpoint = save_untrained(data, run, "--mlm-weight", 1)
    summaries, store = summarize_split(data, "train", data, max_tokens=100, run=run)
    predicting(checkpoint, store.meta["fingerprints"]["dictionary"])
    with_tokens, _ = summarize_split(data, "train", data, max_tokens=100, run=run)
    predicting(checkpoint, "b" * 64)
    without, _ = summarize_split(data, "train", data, max_tokens=100, run=run)
    assert [bool(summary.raised) for summary in with_tokens] == [bool(summary.raised) for summary in summaries]
    assert any(summary.raised for summary in with_tokens)
    assert not any(summary.raised for summary in without)


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
    write_json(run / "stages.json", {"stages": [20]})  # of an earlier version
    shutil.copytree(data / "train.codes", run / "stage-1" / "train.codes")
    newest = run / "checkpoint_1_5.pt"
    history = [{**torch.load(last, weights_only=True)["optimizer_history"][0], "num_updates": 5}]
    torch.save({**torch.load(last, weights_only=True), "optimizer_history": history}, newest)
    predicting(newest, "0" * 64)  # the best checkpoint is of an earlier stage
    assert find_codes(run) == (data, run / "stage-1")
    predicting(newest, "b" * 64)
    with pytest.raises(ValueError, match=r"predicts \(b{12}\)"):
        find_codes(run, data)
