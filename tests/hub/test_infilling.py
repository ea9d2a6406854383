"""A denoising model that has learned one pair by heart fills its gaps."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from mlsm_plugin import hub
from mlsm_plugin.hub.infilling import DenoisingHubInterface
from tests.conftest import Pipeline, fairseq_train, logged, mlsm
from tests.denoising_flags import SIZE
from tests.runs.training_runs import NO_DROPOUT

Capture = pytest.CaptureFixture[str]


SOURCE, TARGET = "The <extra_id_0> walks in <extra_id_1> park.", "<extra_id_0> cute dog <extra_id_1> the green"


@pytest.fixture(scope="module")
def overfitted(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pair of sentences, learned by heart in 100 updates."""
    root = tmp_path_factory.mktemp("pairs")
    (root / "source.txt").write_text(f"{SOURCE}\n", encoding="utf-8")
    (root / "target.txt").write_text(f"{TARGET}\n", encoding="utf-8")
    pair = ("--source", root / "source.txt", "--target", root / "target.txt")
    mlsm("binarize", "--tokenizer", pipeline.tokenizer, *pair, "--output", root / "data-bin")
    assert json.loads((root / "data-bin" / "binarize.json").read_text())["splits"]["train"]["pairs"] == 1
    run = fairseq_train(
        *(root / "data-bin", root / "model", *SIZE, "--tokens-per-sample", 48, *NO_DROPOUT, "--max-update", 100),
        *("--sample-break-mode", "none", "--lr", "1e-2", "--disable-validation", "--batch-size", 8),
        task="span_denoising",
    )
    assert float(logged(run, "loss")[-1]) < 0.05
    shutil.rmtree(root / "data-bin")
    return root / "model"


@pytest.mark.slow
def test_overfitted_model_writes_the_words_that_were_there(overfitted: Path, capsys: Capture) -> None:
    model = hub.from_pretrained(overfitted)
    assert isinstance(model, DenoisingHubInterface)
    filled = model.infill(SOURCE)
    assert filled.text == "The cute dog walks in the green park."
    assert [filler.text for filler in filled.fillers] == ["cute dog", "the green"]
    assert all(-0.1 < filler.score <= 0 and not filler.is_missing for filler in filled.fillers)
    assert filled.target == TARGET
    assert model.decode(model.encode(SOURCE)) == SOURCE.replace(" park.", " park.")
    mlsm("infill", "--checkpoint", overfitted, SOURCE, "--beam", 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "The cute dog walks in the green park."
    assert re.fullmatch(r"  <extra_id_0> +-0\.0\d\d  cute dog", lines[1])


@pytest.mark.slow
def test_sentinel_that_is_not_written_is_an_empty_filler_and_said(overfitted: Path, capsys: Capture) -> None:
    text = f"{SOURCE} <extra_id_7> is here."
    (filler,) = [filler for filler in hub.from_pretrained(overfitted).infill(text).fillers if filler.is_missing]
    assert (filler.sentinel, filler.text, filler.score) == ("<extra_id_7>", "", -float("inf"))
    mlsm("infill", "--checkpoint", overfitted, text)
    captured = capsys.readouterr()
    assert "mlsm: warning: the model wrote nothing for <extra_id_7>" in captured.err
    assert re.search(r"^  <extra_id_7> +-inf  $", captured.out, flags=re.M)
