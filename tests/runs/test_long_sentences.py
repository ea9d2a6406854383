"""Each objective trains on sentences that are longer than a sample, without options for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import CRITERIONS, PLUGIN, REPOSITORY, TINY_MODEL, TINY_TRAINING, WITH_AUXILIARY, Pipeline, logged
from tests.fairseq_process import run_fairseq_train
from tests.long_sentences import data_with_long_sentences

DROPS_LONG_SENTENCES = "--skip-invalid-size-inputs-valid-test"


@pytest.fixture(scope="module")
def data(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data_with_long_sentences(pipeline, tmp_path_factory.mktemp("long sentences"))


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(CRITERIONS))
def test_objective_trains_and_validates_on_sentences_longer_than_a_sample(
    pipeline: Pipeline, data: Path, tmp_path: Path, task: str
) -> None:
    training = [word for word in TINY_TRAINING if word != DROPS_LONG_SENTENCES]
    words = [data, "--user-dir", PLUGIN, "--save-dir", tmp_path, "--task", task, "--criterion", CRITERIONS[task]]
    words += [*TINY_MODEL, *training, "--max-update", 3, "--no-save", "--group-size", 4, "--batch-size", 2]
    if task != "nonparametric_masked_lm":
        words = words[: words.index("--group-size")]
    if task in WITH_AUXILIARY:
        words += ["--auxiliary-checkpoint", pipeline.auxiliary]
    if task == "span_denoising":
        words += ["--arch", "denoising_small", "--decoder-layers", 2, "--decoder-embed-dim", 32]
        words += ["--decoder-attention-heads", 2]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    run = run_fairseq_train([str(word) for word in words], environment=environment)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-4000:]
    assert len(logged(run, "loss")) == 3
    assert len(logged(run, "loss", where="valid")) == 1
    assert "invalid sizes" not in output  # what fairseq says of samples that it drops
    assert "left out" not in output
