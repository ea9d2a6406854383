"""Each bench still runs, on sizes that say nothing about speed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from tests.tiny_models import TinyData, save_untrained_npm

STEPS = ("--vocab", 200, "--tokens", 3000, "--batch-size", 4, "--block", 32, "--rounds", 2, "--warmup", 1)
BENCHES: dict[str, Callable[[TinyData, Path], tuple[object, ...]]] = {
    "code_store_reads": lambda tiny, root: ("--tokens", 4000, "--rounds", 2),
    "cooccurring_spans": lambda tiny, root: ("--data-bin", tiny.data_bin, "--groups", 2, "--tokens-per-sample", 24),
    "dictionary_learning": lambda tiny, root: (
        *("--hidden", hidden_states(root), "--held-out", 100, "--atoms", 16, "--iterations", 2, "--batch-size", 50),
    ),
    "encode_scale": lambda tiny, root: ("--tokens", 500, "--atoms", 32, "--dim", 16, "--directory", root),
    "feature_recovery": lambda tiny, root: (
        *("--features", 60, "--dim", 16, "--roots", 2, "--latents", 24, "--rows", 1200, "--held-out", 300),
        *("--tuning-rows", 200, "--iterations", 2, "--updates", 3, "--seeds", 2, "--output", root / "figures.json"),
    ),
    "learning_curves": lambda tiny, root: (
        *(tiny.data_bin, "--output", root / "curves", "--minutes", 0.001, "--rates", "1e-3", "--seeds", 1),
        *("--speed", "modern=10000", "roberta=10000", "--layers", 1, "--width", 64, "--batch-size", 2),
        *("--block", 24, "--valid-every", 2, "--autocast", "off"),
    ),
    "mlsm_step": lambda tiny, root: ("--size", "tiny", "--atoms", 50, "--nonzeros", 4, "--fista-steps", 2, *STEPS),
    "phrase_datastore": lambda tiny, root: (
        *(
            tiny.data_bin,
            save_untrained_npm(tiny, root / "npm"),
            "--split",
            "valid",
            "--queries",
            2,
            "--k",
            4,
            "--tokens-per-sample",
            24,
        ),
    ),
    "sae_training": lambda tiny, root: (
        *("--hidden", hidden_states(root), "--held-out", 100, "--atoms", 32, "--k", 4, "--iterations", 2),
        *("--lasso-batch", 50, "--passes", 2, "--batch-size", 50, "--rounds", 2, "--dictionary", atoms(root)),
        *("--matryoshka", 8, "--threads", 1),
    ),
    "search_scale": lambda tiny, root: ("--documents", 30, 60, "--queries", 2, "--directory", root),
    "sequence_coding": lambda tiny, root: (
        *(tiny.text, "--tokens", 600, "--block", 24, "--layers", 1, "--width", 32, "--vocab", 300, "--atoms", 16),
        *("--rounds", 1),
    ),
    "span_corruption": lambda tiny, root: ("--length", 60, "--texts", 3, "--rounds", 2),
    "sparse_coding": lambda tiny, root: (
        *("--hidden", hidden_states(root), "--dictionary", atoms(root), "--rows", 20, "--gap-rows", 5, "--rounds", 2),
    ),
    "step_bytes": lambda tiny, root: (
        *("--layers", 1, "--batch-size", 2, "--width", 64, "--block", 32, "--vocab", 50),
    ),
    "taco_step": lambda tiny, root: ("--size", "tiny", "--negatives", 3, *STEPS),
    "trainer_step": lambda tiny, root: (
        *("--layers", 1, "--dim", 64, "--vocab", 200, "--atoms", 40, "--nonzeros", 4, "--batch-size", 4),
        *("--block", 16, "--steps", 4, "--rounds", 1, "--cpu"),
    ),
    "training_step": lambda tiny, root: (
        *("--layers", 1, "--width", 64, "--atoms", 50, "--nonzeros", 4, "--teacher", 1, 64, "--loaders", *STEPS),
        # each flag once, as each training is a process that takes seconds to start
        *("--only", "roberta float32", "modern bf16", "deberta recipe", "compiled", "mlsm", "online + mlm", "taco"),
    ),
}


def hidden_states(root: Path) -> Path:
    np.save(root / "hidden.npy", np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32))
    return root / "hidden.npy"


def atoms(root: Path) -> Path:
    rows = np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32)
    np.save(root / "atoms.npy", rows / np.linalg.norm(rows, axis=1, keepdims=True))
    return root / "atoms.npy"


def test_each_bench_is_run() -> None:
    scripts = {path.stem for path in (REPOSITORY / "scripts" / "bench").glob("*.py")}
    modules = {"paired_steps", "synthetic_features", "training_processes"}
    assert scripts - set(BENCHES) == modules


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
@pytest.mark.usefixtures("warm_python")
def test_a_bench_runs(name: str, tiny: TinyData, tmp_path: Path) -> None:
    if name == "sequence_coding":
        pytest.importorskip("datasets")
    words = [sys.executable, f"scripts/bench/{name}.py", *map(str, BENCHES[name](tiny, tmp_path))]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: a target is missed, as it may be on this size
    assert "Traceback" not in done.stderr
    assert done.stdout
