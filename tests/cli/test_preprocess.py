"""``mlsm preprocess``: the steps from raw text to training data, and reruns that do only the remaining steps."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlsm_plugin.cli.main import main
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from tests.conftest import REPOSITORY, TINY_MODEL, Pipeline, failing_mlsm

BLOCKS = ("--tokens-per-sample", "64")
FEW = ("--atoms", "16", "--tokens", "500", "--iterations", "5", "--threads", "1")
AUXILIARY = (
    *("--auxiliary-arch", "mlsm_roberta_tiny", "--auxiliary-updates", "1", *TINY_MODEL[2:]),
    *("--batch-size", "8", "--num-workers", "0", "--cpu"),
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
Folder = dict[str, bytes]


def write_texts(root: Path, text: Path) -> None:
    """``train.txt`` and ``valid.txt``, as :func:`whole_command` names them."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    (root / "train.txt").write_text("".join(lines[:500]), encoding="utf-8")
    (root / "valid.txt").write_text("".join(lines[500:540]), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and ``run``, which the command made of them; all its paths are relative."""
    root = tmp_path_factory.mktemp("preprocess")
    write_texts(root, english_text[0])
    printed = io.StringIO()
    with contextlib.chdir(root), contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert main(whole_command()) == 0
    (root / "output.txt").write_text(printed.getvalue())
    return root


@pytest.fixture
def texts(english_text: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts alone, as the working directory."""
    write_texts(tmp_path, english_text[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to change, as the working directory."""
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "here"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "here"


def whole_command(*options: str) -> list[str]:
    text = ("--train", "train.txt", "--valid", "valid.txt", "--vocab-size", "300")
    return ["preprocess", *text, "--output", "run", *FEW, *BLOCKS, *AUXILIARY, *options]


def steps_in(output: str) -> dict[str, str]:
    """Step -> state, of the table."""
    return dict(re.findall(r"^(\w+) +(current|done) +[\d.]+ s", output, flags=re.MULTILINE))


def run_again(capfd: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    capfd.readouterr()
    assert main(whole_command(*options)) == 0
    return steps_in(capfd.readouterr().out)


def files_of(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def codes_of(run: Path) -> Folder:
    return {path.name: path.read_bytes() for path in (run / "data-bin" / "train.codes").iterdir()}


@pytest.mark.slow
def test_command_makes_everything_that_training_reads(folder: Path) -> None:
    output = (folder / "output.txt").read_text()
    assert list(steps_in(output).items()) == [
        (step, "done") for step in ("tokenizer", "binarize", "auxiliary", "dictionary", "encode")
    ]
    for split in ("train", "valid"):
        codes = CodeStore(folder / "run" / "data-bin" / f"{split}.codes")
        assert codes.num_atoms == 16
        assert codes.meta["layer"] == 2  # the last
    assert (folder / "run" / "auxiliary" / "checkpoint_best.pt").is_file()


@pytest.mark.slow
def test_second_run_skips_every_step_and_touches_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = files_of(here / "run")
    states = run_again(capfd)
    assert list(states.values()) == ["current"] * 5
    assert files_of(here / "run") == before


@pytest.mark.slow
def test_changed_option_runs_the_steps_from_there_on(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    states = run_again(capfd, "--iterations", "6")
    assert states == {
        **dict.fromkeys(("tokenizer", "binarize", "auxiliary"), "current"),
        **dict.fromkeys(("dictionary", "encode"), "done"),
    }
    assert set(run_again(capfd, "--iterations", "6").values()) == {"current"}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_changed_text_runs_the_steps_from_there_on(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    valid = (here / "valid.txt").read_text(encoding="utf-8")
    (here / "valid.txt").write_text(valid + "This is one more sentence.\n", encoding="utf-8")
    states = run_again(capfd)
    assert states.pop("tokenizer") == "current"  # learned from the training text
    assert set(states.values()) == {"done"}


@pytest.mark.slow
def test_deleted_result_is_made_again(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = codes_of(here / "run")
    shutil.rmtree(here / "run" / "data-bin" / "valid.codes")
    states = run_again(capfd)
    assert [step for step, state in states.items() if state == "done"] == ["encode"]
    assert codes_of(here / "run") == expected


@pytest.mark.slow
def test_failed_step_is_one_line_and_what_was_made_of_its_old_result_is_made_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = codes_of(here / "run")
    line = failing_mlsm(capsys, *whole_command("--layer", "7"))
    assert "--layer 7 is out of range" in line
    assert not (here / "run" / "dictionary").exists()

    capsys.readouterr()
    assert main(whole_command()) == 0
    states = steps_in(capsys.readouterr().out)
    assert [step for step, state in states.items() if state == "done"] == ["dictionary", "encode"]
    assert codes_of(here / "run") == expected


@pytest.mark.slow
def test_coverage_reaches_the_codes(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    states = run_again(capfd, "--coverage", "0.5")
    assert [step for step, state in states.items() if state == "done"] == ["encode"]
    store = CodeStore(here / "run" / "data-bin" / "train.codes")
    assert store.meta["coverage"] == 0.5
    assert 0.4 < store.meta["coded_tokens"] / store.meta["token_count"] < 0.6


@pytest.mark.parametrize(
    ("option", "value"), [("--atoms", "0"), ("--lambda", "-1"), ("--tokens-per-sample", "1"), ("--coverage", "1.5")]
)
def test_number_that_makes_no_sense_is_refused_before_the_first_step(
    texts: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    before = files_of(texts)
    assert option in failing_mlsm(capsys, *whole_command(option, value, "--output", "other"))
    assert files_of(texts) == before


def test_flags_that_nothing_would_read_are_refused(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["preprocess", "--train", "t", "--valid", "v", "--output", "new", "--auxiliary", "aux.pt"]
    assert main([*words, "--lamda", "0.3", "stray"]) == 1
    assert "mlsm: error: unrecognized arguments: --lamda 0.3 stray (with --auxiliary, no" in capsys.readouterr().err
    assert not (texts / "new").exists()


def test_user_symbols_reach_the_tokenizer_that_is_trained(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = whole_command("--output", "other", "--user-symbols", "[url]", "<url>")
    assert "--user-symbols '<url>' cannot be a piece" in failing_mlsm(capsys, *words)


@pytest.mark.parametrize(
    "own", [("--user-symbols", "[url]"), ("--lowercase",), ("--vocab-size", "77"), ("--model-type", "bpe")]
)
@pytest.mark.parametrize("given", ["--tokenizer", "--auxiliary"])
def test_options_of_a_tokenizer_that_is_given_are_refused(
    texts: Path, capsys: pytest.CaptureFixture[str], given: str, own: tuple[str, ...]
) -> None:
    words = ("preprocess", "--train", "t", "--valid", "v", "--output", "new", given, "there")
    line = failing_mlsm(capsys, *words, *own)
    assert f"{own[0]}: only used for training, but there is given; leave it out" in line
    assert not (texts / "new").exists()


@pytest.mark.parametrize("own", [("--auxiliary-arch", "x"), ("--auxiliary-updates", "7"), ("--keep-at", "3")])
def test_options_of_a_model_that_is_given_are_refused(
    texts: Path, capsys: pytest.CaptureFixture[str], own: tuple[str, ...]
) -> None:
    words = ("preprocess", "--train", "t", "--valid", "v", "--output", "new", "--auxiliary", "aux.pt")
    assert f"{own[0]}: only used for training, but aux.pt is given" in failing_mlsm(capsys, *words, *own)


@pytest.mark.slow
def test_options_of_an_sae_reach_the_dictionary(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = whole_command("--coder", "batchtopk", "--k", "4", "--matryoshka", "4", "8")
    assert "--iterations cannot be used with coder batchtopk" in failing_mlsm(capsys, *words)
    where = words.index("--iterations")
    words = [*words[:where], *words[where + 2 :]]
    assert main(words) == 0
    states = steps_in(capsys.readouterr().out)
    assert [step for step, state in states.items() if state == "done"] == ["dictionary", "encode"]
    meta = json.loads((here / "run" / "dictionary" / "meta.json").read_text())
    assert {name: meta[name] for name in ("kind", "method", "k", "matryoshka", "n_atoms")} == {
        **{"kind": "sae", "method": "batchtopk", "k": 4, "matryoshka": [4, 8], "n_atoms": 16}
    }


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_given_auxiliary_model_is_used_and_a_killed_run_goes_on_to_the_same_codes(
    here: Path, pipeline: Pipeline
) -> None:
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", "preprocess", "--train", "train.txt"]
    command += ["--valid", "valid.txt", "--auxiliary", str(pipeline.auxiliary), *FEW, *BLOCKS, "--layer", "1"]
    whole = subprocess.run([*command, "--output", "whole"], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert list(steps_in(whole.stdout)) == ["binarize", "dictionary", "encode"]
    assert (here / "whole" / "data-bin" / "dict.txt").read_bytes() == (pipeline.tokenizer / "dict.txt").read_bytes()
    assert not (here / "whole" / "auxiliary").exists()
    assert CodeStore(here / "whole" / "data-bin" / "train.codes").meta["layer"] == 1

    killed = subprocess.Popen(
        [*command, "--output", "killed"], env=ENVIRONMENT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    record = here / "killed" / "steps.json"
    while not (record.exists() and '"encode"' in record.read_text()):  # its last step has begun
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()  # until nothing of it runs
    assert not (here / "killed" / "data-bin" / "train.codes" / "meta.json").exists()

    again = subprocess.run(
        [*command, "--output", "killed"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert steps_in(again.stdout) == {"binarize": "current", "dictionary": "current", "encode": "done"}
    assert codes_of(here / "killed") == codes_of(here / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_printed_training_command_runs(here: Path) -> None:
    """Its beginning; the command after `mlsm encode`, which has the same source, is run to its end elsewhere."""
    printed = (here / "output.txt").read_text().split("Train with:")[1]
    words = shlex.split(printed.replace("\\\n", " "))
    assert words[0] == "fairseq-train"
    run = subprocess.run(
        [sys.executable, "-m", "fairseq_cli.train", *words[1:], "--max-update", "20"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert (run.stdout + run.stderr).count("| train_inner |") == 2  # a line every 10 updates
    saved = {path.name for path in (here / "run" / "model").iterdir()}
    assert {"checkpoint_last.pt", "dict.txt", "sentencepiece.bpe.model"} <= saved
