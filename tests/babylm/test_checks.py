"""``mlsm babylm check``: each thing that can be wrong is a line, and a good run has none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mlsm_plugin.babylm.cards import NAMES_AND_CITATIONS, write_card
from mlsm_plugin.babylm.checks import problems_of
from mlsm_plugin.babylm.ledger import OF_RUN, Ledger
from mlsm_plugin.babylm.settings import BABYLM_OBJECTIVES, TRACKS
from mlsm_plugin.core.files.atomic_files import read_json, sha256_of_files, write_json
from tests.babylm.made_run import make_run
from tests.conftest import REPOSITORY, mlsm
from tests.hub.test_other_versions import install_version
from tests.tiny_models import TinyData


@pytest.fixture(scope="module")
def good(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("good") / "run"
    make_run(tiny, run)
    return run


def test_a_good_run_has_no_problem(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems_of(good) == []
    mlsm("babylm", "check", good)
    assert "all checks passed with transformers" in capsys.readouterr().out


def changed_weights(run: Path) -> None:
    """Other weights, which the ledger knows."""
    path, ledger = run / "checkpoints" / "main" / "model.safetensors", Ledger.read(run)
    weights = load_file(path)
    weights["lm_head.dense.bias"] += 0.5
    save_file(weights, path, {"format": "pt"})
    ledger.checkpoints["main"]["sha256"] = sha256_of_files(path)
    ledger.write(run)


def of_ledger(**values: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        write_json(run / "ledger.json", {**read_json(run / "ledger.json"), **values})

    return change


def without_license(run: Path) -> None:
    ledger = Ledger.read(run)
    ledger.license = None
    write_card(run / "checkpoints" / "main", "main", ledger)


BREAK: dict[str, Callable[[Path], object]] = {
    "chck_1K is missing; restore it from a copy, or train in another --output": lambda run: shutil.rmtree(
        run / "checkpoints" / "chck_1K"
    ),
    "main is missing; run `mlsm babylm train` again": lambda run: shutil.rmtree(run / "checkpoints" / "main"),
    "main has no model card of 200 characters": lambda run: (run / "checkpoints/main/README.md").write_text("short"),
    "main has no licence; run `mlsm babylm train` again with --license": without_license,
    "main has other weights than those that were exported": lambda run: shutil.copy(
        run / "checkpoints/chck_1K/model.safetensors", run / "checkpoints/main"
    ),
    "the logits of main differ by": changed_weights,
    "main cannot be opened": lambda run: (run / "checkpoints/main/config.json").unlink(),
    "the run has seen 2,100 of 2,400 words; run `mlsm babylm train` again": of_ledger(seen=2100),
    "all text has 1,200 words, but the track allows 1,000": of_ledger(words_allowed=1000),
    "2,400 words were seen, but the track allows 2,000": of_ledger(exposures_allowed=2000),
    "ledger.json allows 20,000 words and 2,400 seen ones, and the track strict-small 10,000,000": of_ledger(
        track="strict-small", words_allowed=20_000
    ),
    "chck_2K has seen only 2,100 words": of_ledger(names={"chck_1K": 1000, "chck_2K": 2200}),
}


@pytest.mark.parametrize("problem", BREAK)
def test_each_problem_is_a_line(good: Path, tmp_path: Path, problem: str) -> None:
    run = shutil.copytree(good, tmp_path / "run")
    BREAK[problem](run)
    (found,) = problems_of(run)
    assert found.startswith(problem)


def test_a_ledger_that_leaves_checkpoints_out_is_named(good: Path, tmp_path: Path) -> None:
    run = shutil.copytree(good, tmp_path / "run")
    limits = TRACKS["strict-small"]
    of_track = {"track": "strict-small", "words_allowed": limits.words, "exposures_allowed": limits.exposures}
    write_json(run / "ledger.json", {**read_json(run / "ledger.json"), **of_track, "planned": 2_000_000, "names": {}})
    lacking = "ledger.json does not name the checkpoints that the track asks for: chck_1M, chck_2M"
    assert lacking in problems_of(run)
    of_ledger(names={"chck_1M": 10**6, "chck_2M": 2 * 10**6})(run)
    assert not any(problem.startswith("ledger.json") for problem in problems_of(run))


def test_words_are_counted_again(good: Path, tmp_path: Path) -> None:
    run = shutil.copytree(good, tmp_path / "run")
    (entry,) = [entry for entry in Ledger.read(run).texts if entry["of"] == OF_RUN]
    (run / "text").mkdir(exist_ok=True)
    text = run / "text" / entry["file"]
    text.write_text("word " * entry["words"] + "\n", encoding="utf-8")
    assert problems_of(run) == []
    text.write_text("word " * 5 + "\n", encoding="utf-8")
    assert problems_of(run) == [f"{text} has 5 words, and ledger.json says {entry['words']:,}"]


def test_every_objective_has_a_card() -> None:
    assert tuple(NAMES_AND_CITATIONS) == BABYLM_OBJECTIVES


@pytest.mark.slow
def test_the_version_of_the_pipeline_reads_the_same(good: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    library = install_version("4.51.3", tmp_path_factory)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(library), str(REPOSITORY)]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", "babylm", "check", str(good)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=library.parent)
    assert "all checks passed with transformers 4.51.3" in done.stdout, done.stderr[-2000:]
