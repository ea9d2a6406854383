"""``mlsm babylm train``: what it refuses; and real runs, whose words are counted to the word."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.babylm.checks import problems_of
from mlsm_plugin.babylm.ledger import Ledger
from mlsm_plugin.babylm.training import text_files
from mlsm_plugin.core.files.atomic_files import read_json, sha256_of_files
from tests.babylm.odd_text import write_odd_text
from tests.conftest import REPOSITORY, failing_mlsm, mlsm
from tests.core.text.test_words import counted_by_wc
from tests.earlier_records import in_earlier_files
from tests.warm_python import REAL_PYTHON

SLOW = pytest.mark.slow
SIZE = ("--arch", "mlsm_modern_tiny", "--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-attention-heads", 2)
LENGTH = ("--batch-size", 8, "--tokens-per-sample", 40, "--vocab-size", 200, "--save-interval-updates", 4)
CUSTOM = ("--track", "custom", "--words", "6K", "--epochs", 2)
COMMON = (*SIZE, *LENGTH, "--cpu", "--workers", 1, "--num-workers", 0, "--threads", 1)
Capture = pytest.CaptureFixture[str]


def words(text: Path, output: Path, *more: object, track: tuple[object, ...] = CUSTOM) -> list[str]:
    return [str(word) for word in ("babylm", "train", text, "--output", output, *track, *COMMON, *more)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_odd_text(tmp_path_factory.mktemp("babylm") / "text")[0].parent


@pytest.fixture(scope="module")
def run(text: Path, warm_python_in_module: Path) -> Path:
    output = text.parent / "run"
    mlsm(*words(text, output, "--license", "mit"))
    return output


def models_of(run: Path) -> dict[str, str]:
    """The ledger's entry of each checkpoint, which holds the words, the updates and the SHA-256 of the weights."""
    ledger = Ledger.read(run)
    for name, own in ledger.checkpoints.items():
        assert sha256_of_files(run / "checkpoints" / name / "model.safetensors") == own["sha256"]
    return {name: json.dumps(own) for name, own in ledger.checkpoints.items()}


def test_the_text_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.train.txt", "a.dev.txt", "b.TRAIN", "c.txt", "notes.md", "._a.train.txt"):
        (tmp_path / name).write_text(f"words of {name}\n", encoding="utf-8")
    (tmp_path / "d.train.txt.gz").write_bytes(gzip.compress(b"other words\n"))
    (tmp_path / "e.train.txt").touch()
    assert [file.name for file in text_files(tmp_path)] == ["a.train.txt", "b.TRAIN", "d.train.txt.gz"]
    assert caplog.messages == [f"{tmp_path}: not trained on: a.dev.txt, c.txt, e.train.txt, notes.md"]
    for file in (*tmp_path.glob("*.train*"), tmp_path / "b.TRAIN"):
        file.unlink()
    assert [file.name for file in text_files(tmp_path)] == ["c.txt"]
    (tmp_path / "c.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no text to train on"):
        text_files(tmp_path)


def test_text_to_measure_on_is_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "more").mkdir()
    names = ("train.txt", "valid.txt", "test.txt", "wiki_dev.txt", "testament.txt", "copy.txt")
    for name in names:
        (tmp_path / name).write_text("the same words\n" if name in names[::5] else f"{name}\n", encoding="utf-8")
    assert [file.name for file in text_files(tmp_path)] == ["copy.txt", "testament.txt", "train.txt"]
    assert caplog.messages == [
        f"{tmp_path}: not trained on: test.txt, valid.txt, wiki_dev.txt, more/",
        f"{tmp_path}/train.txt has the lines of {tmp_path}/copy.txt: they are trained on more than once",
    ]


@pytest.mark.parametrize(
    ("more", "track", "message"),
    [
        ((), ("--track", "custom", "--words", "1K"), "but the track custom allows 1,000; leave some out"),
        (("--auxiliary", "{here}"), ("--objective", "mlsm+mlm"), "has no ledger.json, which says what it was trained"),
        (("--max-tokens", 100), CUSTOM, "--max-tokens is chosen by `mlsm babylm train`, or would change what an epoch"),
        (("--finetune-from-model=x.pt",), CUSTOM, "--finetune-from-model is chosen by"),
        (("--required-batch-size-multiple", 8), CUSTOM, "--required-batch-size-multiple is chosen by"),
        (("--no-last-checkpoints",), CUSTOM, "--no-last-checkpoints is chosen by"),
        ((), ("--epochs", 11), "--epochs must be at most 10 in the track strict-small, got 11"),
    ],
)
def test_what_the_rules_forbid_is_one_line(
    text: Path, tmp_path: Path, capsys: Capture, more: tuple[object, ...], track: tuple[object, ...], message: str
) -> None:
    more = tuple(str(word).format(here=tmp_path) for word in more)
    assert message in failing_mlsm(capsys, *words(text, tmp_path / "run", *more, track=track))
    assert not (tmp_path / "run").exists()


def test_a_folder_without_text_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert "holds no text to train on" in failing_mlsm(capsys, *words(tmp_path, tmp_path / "run"))
    (tmp_path / "a.train.txt").write_bytes(b"\x01\n\x02\n")
    assert "the text has no words" in failing_mlsm(capsys, *words(tmp_path, tmp_path / "run"))
    assert "is not a folder of text files" in failing_mlsm(capsys, *words(tmp_path / "no", tmp_path / "run"))


@SLOW
def test_the_words_seen_are_those_of_wc(run: Path, text: Path) -> None:
    ledger, wanted = Ledger.read(run), counted_by_wc(*sorted(text.iterdir()))
    assert (ledger.words, ledger.seen, ledger.planned) == (wanted, 2 * wanted, 2 * wanted)
    assert list(ledger.checkpoints) == [*ledger.names, "main"]
    sizes = [own["words"] for own in ledger.checkpoints.values()]
    most = max(later - sooner for sooner, later in zip([0, *sizes], sizes, strict=False))
    assert all(words <= ledger.checkpoints[name]["words"] < words + most for name, words in ledger.names.items())
    assert problems_of(run) == []
    assert not list((run / "model" / "words").iterdir())


@SLOW
def test_a_killed_run_makes_the_same_models(run: Path, text: Path, tmp_path: Path) -> None:
    command = [str(REAL_PYTHON), "-m", "mlsm_plugin.cli.main", *words(text, tmp_path / "run", "--license", "mit")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    kept = tmp_path / "run" / "model" / "words" / "chck_3K.pt"
    while not kept.exists() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert Ledger.read(tmp_path / "run").seen < Ledger.read(run).seen
    mlsm(*words(text, tmp_path / "run"))
    assert models_of(tmp_path / "run") == models_of(run)
    assert problems_of(tmp_path / "run") == []


@SLOW
def test_two_ranks_with_accumulation_count_every_word_once(
    text: Path, tmp_path: Path, warm_python_in_module: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = ("--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")
    ranks += ("--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-world-size", "2")
    more = ("--update-freq", 3, "--objective", "mlsm+mlm", "--atoms", 12, "--k", 3, "--tokens", 500, *ranks)

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mlsm_plugin.cli.main", *words(text, tmp_path / "run", *more)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, "--distributed-rank", str(rank)], env=environment, capture_output=True, text=True
        )

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(start, range(2)))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]
    ledger = Ledger.read(tmp_path / "run")
    assert ledger.seen == 2 * counted_by_wc(*sorted(text.iterdir()))
    assert list(ledger.checkpoints) == [*ledger.names, "main"]


@SLOW
def test_the_words_of_an_auxiliary_model_are_charged(
    run: Path, text: Path, tmp_path: Path, capsys: Capture, warm_python_in_module: Path
) -> None:
    coded = ("--objective", "mlsm+mlm", "--auxiliary", run, "--atoms", 12, "--k", 3, "--tokens", 500)
    assert "more than the 12,000 words that the track custom allows" in failing_mlsm(
        capsys, *words(text, tmp_path / "run", *coded)
    )
    wider = ("--track", "custom", "--words", "6K", "--epochs", 4)
    other = tmp_path / "text"
    shutil.copytree(text, other)
    (other / "c.train.txt").write_text("five words that are new\n" * 3, encoding="utf-8")
    seen, own = Ledger.read(run).seen, counted_by_wc(*sorted(other.iterdir()))
    assert 24_000 - seen > 2 * own
    message = failing_mlsm(capsys, *words(other, tmp_path / "run", *coded, track=wider))
    assert f"4 epochs of {own:,} words, after {seen:,} of an auxiliary model" in message


@SLOW
def test_another_text_or_batch_size_is_not_resumed(
    run: Path, text: Path, tmp_path: Path, capsys: Capture, warm_python_in_module: Path
) -> None:
    changed = shutil.copytree(text, tmp_path / "text")
    with open(changed / "a.train.txt", "a", encoding="utf-8") as file:
        file.write("one\n")
    assert "was begun with other settings: texts.a.train.txt.sha256 is" in failing_mlsm(capsys, *words(changed, run))
    assert "batch_size is 8 there and 4 now" in failing_mlsm(capsys, *words(text, run, "--batch-size", 4))
    before = models_of(run)
    mlsm(*words(text, run))
    assert models_of(run) == before


@SLOW
def test_a_run_of_an_earlier_version_goes_on(
    run: Path, text: Path, tmp_path: Path, capsys: Capture, warm_python_in_module: Path
) -> None:
    earlier = shutil.copytree(run, tmp_path / "run")
    record = in_earlier_files(earlier, "run")
    in_earlier_files(earlier / "model", "data")
    assert "batch_size is 8 there and 4 now. Choose another --output" in failing_mlsm(
        capsys, *words(text, earlier, "--batch-size", 4)
    )
    before = models_of(earlier)
    mlsm(*words(text, earlier))
    assert models_of(earlier) == before
    assert read_json(earlier / "steps.json")["run"] == record["run"]


@SLOW
def test_an_attempt_that_trained_nothing_decides_nothing(
    text: Path, tmp_path: Path, capsys: Capture, warm_python_in_module: Path
) -> None:
    output = tmp_path / "run"
    assert "vocabulary of 9999 pieces" in failing_mlsm(capsys, *words(text, output, "--vocab-size", 9999))
    other = shutil.copytree(text, tmp_path / "text")
    with open(other / "a.train.txt", "a", encoding="utf-8") as file:
        file.write("one\n")
    mlsm(*words(other, output, "--epochs", 1, "--license", "mit", "--muon-lr", 0.01))
    ledger, wanted = Ledger.read(output), counted_by_wc(*sorted(other.iterdir()))
    assert (ledger.words, ledger.seen, ledger.epochs) == (wanted, wanted, 1)
    assert problems_of(output) == []
    before = models_of(output)
    shutil.rmtree(output / "model")
    mlsm(*words(other, output, "--epochs", 1, "--lr", 5e-3))  # a new training: every model is another one
    assert all(model != before[name] for name, model in models_of(output).items())
    assert problems_of(output) == []
    shutil.rmtree(output / "data-bin")  # something was trained: its settings count
    assert "epochs is 1 there and 2 now" in failing_mlsm(capsys, *words(other, output))


def settings_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@SLOW
def test_taco_trains_and_its_models_are_checked(text: Path, tmp_path: Path, warm_python_in_module: Path) -> None:
    mlsm(*words(text, tmp_path / "run", "--objective", "taco", "--license", "mit", "--epochs", 1))
    assert problems_of(tmp_path / "run") == []
    assert settings_of(tmp_path / "run" / "checkpoints" / "main")["architectures"] == ["ModernBertForMaskedLM"]


@SLOW
def test_usual_settings_keep_a_model_of_each_ten_thousand_words_and_then_of_each_hundred_thousand(
    english_text: tuple[Path, Path], tmp_path: Path
) -> None:
    lines = [line for line in english_text[0].read_text(encoding="utf-8").splitlines() if line]
    rng = random.Random(1)
    number = 0
    (tmp_path / "text").mkdir()
    with open(tmp_path / "text" / "a.train.txt", "w", encoding="utf-8") as file:
        while number < 299_000:
            line = rng.choice(lines)
            number += len(line.split())
            file.write(f"{line}\n")
    size = ("--encoder-layers", 2, "--encoder-embed-dim", 128, "--encoder-attention-heads", 2, "--vocab-size", 3000)
    more = ("--track", "custom", "--words", "300K", "--epochs", 1, "--license", "mit", "--cpu", "--workers", 1, *size)
    mlsm("babylm", "train", tmp_path / "text", "--output", tmp_path / "run", "--arch", "mlsm_modern_tiny", *more)
    ledger = Ledger.read(tmp_path / "run")
    assert ledger.seen == counted_by_wc(tmp_path / "text" / "a.train.txt")
    assert [*ledger.checkpoints] == [*(f"chck_{n}0K" for n in range(1, 11)), "chck_200K", "main"]
    assert problems_of(tmp_path / "run") == []
