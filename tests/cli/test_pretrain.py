"""``mlsm pretrain``: MLSM in stages, with the codes of the model itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlsm_plugin import hub
from mlsm_plugin.core.files.step_record import StepRecord
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import model_fingerprint, updates_of
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.reports.coded_datasets import find_codes
from tests.attacks.killed_runs import assert_equal, state_of
from tests.cli.test_auxiliary import output_of, updates_in
from tests.conftest import REPOSITORY, Pipeline, failing_mlsm, mlsm
from tests.docs.pages import commands_of, read
from tests.earlier_records import in_earlier_files
from tests.tiny_models import TinyData

SLOW = pytest.mark.slow
TRAINING = (
    *("--batch-size", 8, "--tokens-per-sample", 64, "--encoder-layers", 2, "--encoder-embed-dim", 32, "--seed", 3),
    *("--encoder-attention-heads", 2, "--lr", "1e-3", "--log-interval", 1, "--num-workers", 0, "--cpu"),
    *("--arch", "mlsm_modern_tiny", "--max-update", 12, "--save-interval-updates", 2),
)
CODES = ("--stages", 50, 75, "--atoms", 24, "--k", 4, "--tokens", 2000, "--threads", 1)
Capture = pytest.CaptureFixture[str]


def words(data: Path, save_dir: Path, *more: object) -> list[str]:
    """The documented command with other numbers."""
    (documented,) = commands_of(read("docs/stages.md"))
    assert documented[:5] == ["mlsm", "pretrain", "data-bin", "--save-dir", "model"]
    return [str(word) for word in ("pretrain", data, "--save-dir", save_dir, *documented[5:], *TRAINING, *CODES, *more)]


@dataclass(frozen=True)
class Run:
    """A run of 12 updates, with codes from update 6 on and other codes from update 9 on; and what it printed."""

    folder: Path
    printed: str


@pytest.fixture(scope="module")
def run(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory, warm_python_in_module: Path) -> Run:
    folder = tmp_path_factory.mktemp("pretrain") / "run"
    return Run(folder, output_of("mlsm_plugin.cli.main", *words(pipeline.data_bin, folder)))


@SLOW
def test_the_first_stage_is_masked_lm_and_one_schedule_spans_all(run: Run, pipeline: Pipeline, tmp_path: Path) -> None:
    plain = output_of(
        "mlsm_plugin.cli.main", "auxiliary", pipeline.data_bin, "--save-dir", tmp_path, *TRAINING, "--keep-at", 100
    )
    expected, found = updates_in(plain), updates_in(run.printed)
    assert [int(update) for update, *_ in found] == list(range(1, 13))
    assert found[:6] == expected[:6]
    assert [rate for _, _, rate, *_ in found] == [rate for _, _, rate, *_ in expected]
    for number in (1, 2, 3):
        assert f"stage {number} of 3, updates " in run.printed
    assert run.printed.count("kl=") == 6


@SLOW
def test_the_codes_are_those_of_the_model_at_the_beginning_of_each_stage(run: Run) -> None:
    for number, update in ((1, 6), (2, 9)):
        folder = run.folder / f"stage-{number}"
        assert updates_of(folder / "model.pt") == update
        for split in ("train", "valid"):
            store = CodeStore(folder / f"{split}.codes")
            assert store.num_atoms == 24
            assert store.meta["fingerprints"]["auxiliary"] == model_fingerprint(folder / "model.pt")
    fingerprints = {
        CodeStore(run.folder / f"stage-{i}" / "train.codes").meta["fingerprints"]["dictionary"] for i in (1, 2)
    }
    assert len(fingerprints) == 2


@SLOW
def test_the_model_is_used_as_any_other(run: Run, pipeline: Pipeline) -> None:
    model = hub.from_pretrained(run.folder)
    assert model.num_atoms == 24
    assert len(model.fill_mask("This is a <mask>.", topk=2)) == 2
    assert find_codes(run.folder) == (pipeline.data_bin, run.folder / "stage-2")
    best, last = (updates_of(run.folder / f"checkpoint_{name}.pt") for name in ("best", "last"))
    assert best == last == 12  # by the masked-LM loss, which all stages have


def times(folder: Path) -> dict[Path, int]:
    """When the checkpoints and the files of the stages were written."""
    return {path: path.stat().st_mtime_ns for path in [*folder.glob("*.pt"), *folder.glob("stage-*/**/*")]}


@SLOW
def test_a_finished_run_is_left_as_it_is_and_other_stages_are_refused(
    run: Run, pipeline: Pipeline, capsys: Capture
) -> None:
    before = times(run.folder)
    again = output_of("mlsm_plugin.cli.main", *words(pipeline.data_bin, run.folder))
    assert again.splitlines()[-1] == f"all 3 stages are complete: {run.folder / 'checkpoint_last.pt'}"
    problem = failing_mlsm(capsys, *words(pipeline.data_bin, run.folder, "--stages", 30))
    assert "stages is [50, 75] there and [30] now. Choose another --save-dir" in problem
    assert times(run.folder) == before


@SLOW
@pytest.mark.usefixtures("warm_python")
def test_a_killed_run_ends_as_one_that_was_never_stopped(run: Run, pipeline: Pipeline, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", *words(pipeline.data_bin, folder)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    for sign in ("stage-1/model.pt", "stage-1/dictionary", "stage-1/train.codes/meta.json", "stage-2"):
        with open(log, "w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=REPOSITORY)
        while process.poll() is None and not (folder / sign).exists():
            time.sleep(0.02)
        assert process.returncode is None, log.read_text()[-3000:]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    output_of(*command[2:])
    assert_equal(state_of(folder / "checkpoint_last.pt"), state_of(run.folder / "checkpoint_last.pt"))
    for number in (1, 2):
        own, expected = (parent / f"stage-{number}" / "valid.codes" for parent in (folder, run.folder))
        assert {p.name: p.read_bytes() for p in own.iterdir()} == {p.name: p.read_bytes() for p in expected.iterdir()}
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


@SLOW
@pytest.mark.usefixtures("warm_python")
def test_a_layer_that_the_model_lacks_can_be_corrected_also_in_a_run_of_an_earlier_version(
    run: Run, pipeline: Pipeline, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"
    wrong = [sys.executable, "-m", "mlsm_plugin.cli.main", *words(pipeline.data_bin, folder, "--layer", 9)]
    assert subprocess.run(wrong, capture_output=True).returncode == 1
    assert updates_of(folder / LAST) == 6
    before = StepRecord(folder / "steps.json").seconds_of("stage 0: training")
    in_earlier_files(folder, "data", "stages")
    problem = failing_mlsm(capsys, *words(pipeline.data_bin, folder, "--seed", 4))
    assert "seed is 3 there and 4 now. Choose another --save-dir" in problem
    output_of("mlsm_plugin.cli.main", *words(pipeline.data_bin, folder))
    assert_equal(state_of(folder / LAST), state_of(run.folder / LAST))
    after, whole = (StepRecord(path / "steps.json") for path in (folder, run.folder))
    assert after.seconds_of("stage 0: training") == before > 0
    assert after.settings_of("data") == whole.settings_of("data")
    assert after.settings_of("stages") == whole.settings_of("stages")


@SLOW
@pytest.mark.usefixtures("warm_python")
def test_codes_of_a_dictionary_computed_online(pipeline: Pipeline, tmp_path: Path) -> None:
    online = ("--stages", 75, "--latent-source", "online", "--coder", "lasso", "--iterations", 5, "--layer", 1)
    training = ("pretrain", pipeline.data_bin, "--save-dir", tmp_path / "run", *TRAINING)
    printed = output_of("mlsm_plugin.cli.main", *training, *online, *CODES[3:5], *CODES[7:])
    assert printed.count("kl=") == 3
    assert sorted(path.name for path in (tmp_path / "run" / "stage-1").iterdir()) == ["dictionary", "model.pt"]


@SLOW
@pytest.mark.usefixtures("warm_python")
def test_several_datasets_and_validation_sets_are_all_coded(pipeline: Pipeline, tmp_path: Path) -> None:
    first, second = tmp_path / "first", pipeline.data_bin
    texts = [word for split in ("train", "valid", "test") for word in (f"--{split}", pipeline.valid_text)]
    mlsm("binarize", "--tokenizer", pipeline.tokenizer, *texts, "--output", first)
    more = ("--batch-size", 32, "--valid-subset", "valid,test", "--stages", 50)
    printed = output_of("mlsm_plugin.cli.main", *words(Path(f"{first}:{second}"), tmp_path / "run", *more))
    stage = tmp_path / "run" / "stage-1"
    coded = sorted(str(path.relative_to(stage)) for path in stage.rglob("*.codes"))
    assert coded == ["data-2/train.codes", "test.codes", "train.codes", "valid.codes"]
    assert len(CodeStore(stage / "data-2" / "train.codes")) > 10 * len(CodeStore(stage / "train.codes"))
    assert "epoch 002" in printed  # trains on the codes of the second dataset
    assert printed.count("valid on 'test' subset") == printed.count("valid on 'valid' subset") > 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--stages", 0), "--stages takes percentages from 1 to 99, got 0"),
        (("--stages", 1), "with --stages 1 and --max-update 12 a stage has no update"),
        (("--mlm-weight", 0), "--mlm-weight must be positive, got 0"),
        (("--criterion", "masked_lm"), "--criterion is chosen for each stage by `mlsm pretrain`; leave it out"),
        (("--task=masked_lm",), "--task is chosen for each stage"),
        (("--layer", -1), "--layer must be at least 0, got -1"),
        (("--lambda", 0.1), "--lambda"),
        (("--k", 30), "k must be from 1 to the number of atoms, 24, got 30"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    pipeline: Pipeline, tmp_path: Path, capsys: Capture, options: tuple[object, ...], problem: str
) -> None:
    assert problem in failing_mlsm(capsys, *words(pipeline.data_bin, tmp_path / "run", *options))
    assert not (tmp_path / "run").exists()


def test_training_that_ends_before_its_stage_is_named(
    tiny: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("mlsm_plugin.fairseq_plugin.pipelines.pretraining.run_child", lambda command: 0)
    problem = failing_mlsm(capsys, *words(tiny.data_bin, tmp_path / "run", "--max-epoch=1"))
    assert "training ended after update 0, before update 6 (--max-epoch 1)" in problem
    assert "the next stage begins with the model after update 6" in problem


def test_a_dataset_that_is_missing_is_named(tmp_path: Path, capsys: Capture) -> None:
    assert "absent" in failing_mlsm(capsys, *words(tmp_path / "absent", tmp_path / "run"))
    assert not (tmp_path / "run").exists()
