"""A denoising model that has learned one sentence by heart fills its gaps."""

from __future__ import annotations

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
    """One sentence, learned by heart with gaps in all places."""
    root = tmp_path_factory.mktemp("sentence")
    (root / "text.txt").write_text("The cute dog walks in the green park.\n" * 64, encoding="utf-8")
    text = ("--train", root / "text.txt", "--valid", root / "text.txt")
    mlsm("binarize", "--tokenizer", pipeline.tokenizer, *text, "--output", root / "data-bin", "--max-unk-rate", 1)
    run = fairseq_train(
        *(root / "data-bin", root / "model", *SIZE, "--tokens-per-sample", 48, *NO_DROPOUT, "--max-update", 300),
        *("--sample-break-mode", "eos", "--lr", "1e-2", "--disable-validation", "--batch-size", 32),
        *("--noise-density", 0.4, "--mean-span-length", 3, "--rotate", "--mask-whole-words"),
        task="span_denoising",
    )
    assert float(logged(run, "loss")[-1]) < 1
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
    assert filled.target.startswith(TARGET)
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
