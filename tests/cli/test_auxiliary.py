"""``mlsm auxiliary``: pre-training in several parts gives the same as one run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlsm_plugin.cli.main import main
from mlsm_plugin.core.files.step_record import StepRecord
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import updates_of
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import default_flags
from tests.conftest import PLUGIN, REPOSITORY, TINY_MODEL, Pipeline, failing_mlsm, mlsm
from tests.tiny_models import TinyData

UPDATES = 8
MODERN = "mlsm_modern_tiny"
FLAGS = [
    *(*TINY_MODEL, "--sample-break-mode", "complete", "--tokens-per-sample", "64", "--batch-size", "8"),
    *("--num-workers", "0", "--log-interval", "1", "--cpu", "--lr", "1e-3"),
]


@dataclass(frozen=True)
class Runs:
    """What runs printed, and the parent of their folders ``parts``, ``restored`` and ``finetuned``.

    ``plain`` is one uninterrupted ``fairseq-train`` with what ``parts`` did by ``mlsm auxiliary``.
    """

    parts: str
    plain: str
    restored: str
    finetuned: str
    root: Path


def output_of(*command: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", *(str(word) for word in command)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout + run.stderr


def updates_in(output: str) -> list[tuple[str, ...]]:
    """Update, loss, learning rate, gradient norm and share of masks, as printed."""
    lines = [line for line in output.splitlines() if "| train_inner |" in line]
    names = ("num_updates", "loss", "lr", "gnorm", "masked_share")
    return [tuple(re.search(rf"\b{name}=([-+.\de]+)", line)[1] for name in names) for line in lines]  # type: ignore[index]


@pytest.fixture(scope="module")
def runs(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory, warm_python_in_module: Path) -> Runs:
    root = tmp_path_factory.mktemp("auxiliary")

    def auxiliary(name: str, updates: int, *flags: object) -> list[object]:
        command = ["mlsm_plugin.cli.main", "auxiliary", pipeline.data_bin, "--save-dir", root / name]
        return [*command, "--max-update", updates, *FLAGS, *flags]

    plain = ["fairseq_cli.train", pipeline.data_bin, "--user-dir", PLUGIN, "--save-dir", root / "plain"]
    own = [*FLAGS, "--arch", MODERN, "--max-update", UPDATES]
    commands = (
        auxiliary("parts", UPDATES, "--arch", MODERN),
        [*plain, *default_flags(UPDATES, MODERN, FLAGS, optimizer="muon"), *own],
        auxiliary("restored", 24, "--lr-scheduler", "fixed", "--restore-file", pipeline.auxiliary),
        auxiliary("finetuned", 1, "--finetune-from-model", pipeline.auxiliary),
    )
    with ThreadPoolExecutor(2) as pool:
        return Runs(*pool.map(lambda command: output_of(*command), commands), root)


@pytest.mark.slow
def test_one_schedule_runs_through_all_parts(runs: Runs) -> None:
    expected = updates_in(runs.plain)
    assert [int(update) for update, *_ in expected] == list(range(1, UPDATES + 1))
    assert len({learning_rate for _, _, learning_rate, *_ in expected}) == UPDATES  # it falls at every update
    shares = [float(share) for *_, share in expected]
    assert shares[0] > 0.25 > 0.2 > shares[-1]
    assert updates_in(runs.parts) == expected


@pytest.mark.slow
def test_checkpoints_are_kept_at_10_25_50_and_100_percent(runs: Runs) -> None:
    kept = [runs.root / "parts" / f"checkpoint_at_{percentage}_percent.pt" for percentage in (10, 25, 50, 100)]
    assert [updates_of(checkpoint) for checkpoint in kept] == [1, 2, 4, 8]
    for checkpoint in kept:
        assert str(checkpoint) in runs.parts


@pytest.mark.slow
def test_tokenizer_and_dictionary_lie_beside_the_checkpoints(pipeline: Pipeline, runs: Runs) -> None:
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        assert (runs.root / "parts" / name).read_bytes() == (pipeline.data_bin / name).read_bytes()


@pytest.mark.slow
def test_finished_run_is_left_as_it_is(pipeline: Pipeline, runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in (runs.root / "parts").iterdir()}
    where = (pipeline.data_bin, "--save-dir", runs.root / "parts")
    mlsm("auxiliary", *where, "--max-update", UPDATES, *FLAGS, "--arch", MODERN)
    captured = capfd.readouterr()
    assert "train_inner" not in captured.out + captured.err
    assert {path.name: path.read_bytes() for path in (runs.root / "parts").iterdir()} == before


@pytest.mark.slow
def test_restored_checkpoint_is_continued_with_its_updates(runs: Runs) -> None:
    assert [int(update) for update, *_ in updates_in(runs.restored)] == [21, 22, 23, 24]
    assert updates_of(runs.root / "restored" / "checkpoint_at_100_percent.pt") == 24
    assert not (runs.root / "restored" / "checkpoint_at_10_percent.pt").exists()  # the run began after it


@pytest.mark.slow
def test_finetuned_checkpoint_starts_with_its_weights_and_no_updates(runs: Runs) -> None:
    [(update, loss, *_)] = updates_in(runs.finetuned)
    assert int(update) == 1
    assert float(loss) < float(updates_in(runs.plain)[0][1]) - 0.3  # the same batch, from scratch


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_datasets_joined_by_a_colon_are_used_in_turn(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", pipeline.data_bin
    texts = ("--train", pipeline.valid_text, "--valid", pipeline.valid_text)
    mlsm("binarize", "--tokenizer", pipeline.tokenizer, *texts, "--output", first)
    words = ("auxiliary", f"{first}:{second}", "--save-dir", tmp_path / "run", *FLAGS, "--batch-size", 32)
    printed = output_of("mlsm_plugin.cli.main", *words, "--max-update", 8, "--keep-at", 50)
    epochs = re.findall(r"epoch (\d+): .*num_updates=(\d+)", printed)
    assert {epoch for epoch, _ in epochs} == {"001", "002"}
    assert [int(update) for _, update in epochs] == list(range(1, 9))
    loaded = re.findall(r"loaded [\d,]+ examples from: (\S+)/train$", printed, re.MULTILINE)
    assert loaded == [str(first), str(second), str(second)]  # the part from update 4 on begins in the second epoch
    assert len(StepRecord(tmp_path / "run" / "steps.json").settings_of("data")["train"]) == 2
    assert "was begun with other settings: train" in failing_mlsm(capsys, words[0], second, *words[2:])


def test_datasets_of_different_vocabularies_are_refused(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny.copy(tmp_path / "other")
    symbols = (other / "dict.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (other / "dict.txt").write_text("".join([*symbols[1:], symbols[0]]), encoding="utf-8")
    run = ("--save-dir", tmp_path / "run", "--max-update", 10)
    for command in ("auxiliary", "pretrain"):
        line = failing_mlsm(capsys, command, f"{tiny.data_bin}:{other}", *run)
        assert f"{other} has another vocabulary than" in line
        assert "the same ids mean other pieces" in line
        absent = failing_mlsm(capsys, command, f"{tiny.data_bin}:{tmp_path}", *run)
        assert f"{tmp_path}/train.idx: No such file or directory" in absent
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_flag_that_fairseq_does_not_know_ends_with_fairseqs_own_message(
    pipeline: Pipeline, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["auxiliary", pipeline.data_bin, "--save-dir", tmp_path / "model", "--max-update", 2, "--no-such-flag"]
    assert main([str(word) for word in command]) == 1
    errors = capfd.readouterr().err
    assert "unrecognized arguments: --no-such-flag" in errors
    assert errors.splitlines()[-1].startswith("mlsm: error: fairseq-train stopped with exit status 2")
    assert "Traceback" not in errors
    assert not list((tmp_path / "model").glob("*.pt"))
