"""Several ranks that torchrun starts compute what one computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlsm_plugin.huggingface import LatentSemanticModel, TokenSequences
from tests.conftest import REPOSITORY
from tests.huggingface.tiny_corpus import random_ids, write_codes
from tests.huggingface.trainer_process import evaluate, train


def on_two_ranks(*words: object) -> None:
    """Run tests.huggingface.trainer_process."""
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--standalone")
    search_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, *launcher, "-m", "tests.huggingface.trainer_process", *map(str, words)],
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mlm", "taco", "npm"])
@pytest.mark.usefixtures("warm_python")
def test_two_ranks_evaluate_as_one_does(tmp_path: Path, objective: str) -> None:
    evaluate(objective, str(tmp_path / "one.json"))
    on_two_ranks(objective, tmp_path / "two.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    names = [name for name in one if name.endswith(("_loss", "accuracy")) and name != "eval_loss"]
    assert len(names) >= 1
    for name in names:
        assert two[name] == pytest.approx(one[name], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    write_codes(TokenSequences(random_ids(24)), tmp_path / "codes")
    train(str(tmp_path / "codes"), str(tmp_path / "one"), 8)
    on_two_ranks(tmp_path / "codes", tmp_path / "two", 4)
    models = [LatentSemanticModel.from_pretrained(tmp_path / name / "model").state_dict() for name in ("one", "two")]
    assert max(float((values - models[1][name]).abs().max()) for name, values in models[0].items()) < 1e-4
    one, two = (
        json.loads((tmp_path / name / "model" / "trainer_state.json").read_text())["log_history"]
        for name in ("one", "two")
    )
    for first, second in zip(one, two, strict=True):
        for name in ("loss", "kl", "mlm_loss", "eval_kl", "eval_mlm_loss"):
            assert (name in second) == (name in first)
            assert second.get(name, 0) == pytest.approx(first.get(name, 0), rel=1e-4), name
