"""Training with codes for only a share of the positions."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import Pipeline, fairseq_train, logged
from tests.fairseq_plugin.data.test_covered_masks import cover

pytestmark = pytest.mark.slow


@pytest.fixture
def covered_data(pipeline: Pipeline, tmp_path: Path) -> Path:
    """The shared data-bin with codes of 0.2 of the training positions and of all validation positions."""
    ignored = shutil.ignore_patterns("train.codes")
    folder = shutil.copytree(pipeline.data_bin, tmp_path / "data-bin", ignore=ignored)
    cover(pipeline.data_bin / "train.codes", folder / "train.codes", 0.2, 7)
    return folder


def test_run_masks_covered_tokens_at_the_usual_rate_and_says_so(
    pipeline: Pipeline, covered_data: Path, tmp_path: Path
) -> None:
    flags = ("--max-update", 6, "--batch-size", 64, "--no-save")
    run = fairseq_train(covered_data, tmp_path, *flags, "--num-workers", 1)
    said = re.findall(
        r"(\w+)\.codes covers (\S+) of the positions \(seed (\d+)\): masks are drawn", run.stdout + run.stderr
    )
    assert said == [("train", "0.2", "7")]
    assert [float(share) for share in logged(run, "coded")] == [1.0] * 6
    (valid,) = logged(run, "coded", where="valid")
    assert 0.9 < float(valid) <= 1
    losses = [float(value) for value in logged(run, "loss")]
    assert losses[-1] < losses[0]
