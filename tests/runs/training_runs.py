"""Common parts of the tests of training: runs that are stopped, restarted, spread over ranks, fine-tuned."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mlsm_plugin import hub
from tests.conftest import PLUGIN, REPOSITORY, TINY_MODEL, TINY_TRAINING, Pipeline, fairseq_train, logged

NO_DROPOUT = ("--dropout", 0, "--attention-dropout", 0)
Run = subprocess.CompletedProcess[str]
Updates = dict[int, dict[str, str]]


def text_of(run: Run) -> str:
    return run.stdout + run.stderr


@contextmanager
def two_at_a_time(calls: dict[str, Callable[[], Run]]) -> Iterator[dict[str, Future[Run]]]:
    """Start the runs, one thread each: more threads do not make tiny models faster, and would compete."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield {name: pool.submit(call) for name, call in calls.items()}
        pool.shutdown(cancel_futures=True)


def command_of(data: object, save_dir: object, *flags: object) -> list[str]:
    """The command of :func:`fairseq_train`, for runs that a test stops or starts itself."""
    words = [
        *(sys.executable, "-u", "-m", "fairseq_cli.train", data, "--user-dir", PLUGIN, "--save-dir", save_dir),
        *("--task", "masked_latent_semantic", "--criterion", "latent_semantic_kl", *TINY_MODEL, *TINY_TRAINING),
        *("--no-epoch-checkpoints", *flags),
    ]
    return [str(word) for word in words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def updates_in(output: str) -> Updates:
    """Loss, gradient norm and learning rate of each update, as printed."""
    found = {}
    for line in output.splitlines():
        if "| train_inner |" in line:
            values = dict(
                re.findall(r"\b(num_updates|loss|kl|mlm_loss|contrastive_loss|gnorm|lr)[= ]([-+.\de]+)", line)
            )
            found[int(values.pop("num_updates"))] = values
    return found


def assert_same_updates(found: Updates, expected: Updates, count: int) -> None:
    """The same values up to rounding, in ``count`` updates."""
    assert list(found) == list(expected) == list(range(1, count + 1))
    for update, values in expected.items():
        for name, value in values.items():
            assert float(found[update][name]) == pytest.approx(float(value), abs=2e-3), (update, name)


def assert_loaders_change_nothing(runs: dict[str, Future[Run]]) -> None:
    alone, helped = (updates_in(text_of(runs[name].result())) for name in ("trained", "two loaders"))
    assert len(alone) == 4
    assert helped == alone


def assert_fp16_starts_alike(runs: dict[str, Future[Run]], *metrics: str, rel: float = 0.02) -> None:
    """The first training loss and the first validation loss in half precision are those in float32."""
    for metric in metrics:
        for where in ("train_inner", "valid"):
            exact, rounded = (
                float(logged(runs[name].result(), metric, where=where)[0]) for name in ("trained", "fp16")
            )
            assert rounded == pytest.approx(exact, rel=rel)


def train_until_killed(command: list[str], stop_after: int | None) -> Updates:
    """Run; once update ``stop_after`` is printed, SIGKILL the run's process group. Returns the printed updates."""
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True
    )
    assert run.stdout is not None
    lines = []
    try:
        for line in run.stdout:
            lines.append(line)
            if stop_after is not None and stop_after in updates_in(line):
                break
    finally:
        if stop_after is not None:
            os.killpg(run.pid, signal.SIGKILL)
        lines.append(run.stdout.read())  # what was in the pipe
        run.wait()
    assert run.returncode == (0 if stop_after is None else -signal.SIGKILL), "".join(lines)[-3000:]
    return updates_in("".join(lines))


def updates_of_a_stopped_run(*words: object, task: str) -> Updates:
    """The printed updates of a run of :func:`fairseq_train` that ends after three updates and resumes up to six."""
    parts = []
    for last in (3, 6):
        part = fairseq_train(*words, "--max-update", last, task=task)
        parts.append(updates_in(text_of(part)))
    assert [list(part) for part in parts] == [[1, 2, 3], [4, 5, 6]]
    return parts[0] | parts[1]


def train_on_two_ranks(data: object, save_dir: Path, *flags: object) -> list[Run]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in (0, 1):
        command = command_of(data, save_dir, *flags)
        command += ["--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-world-size", "2"]
        command += ["--distributed-rank", str(rank), "--distributed-no-spawn", "--distributed-backend", "gloo"]
        ranks.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
        )
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, output, "")
        for process, output in zip(ranks, outputs, strict=True)
    ]


def classification_data(pipeline: Pipeline, root: Path) -> Path:
    """``input0`` and ``label`` of a toy problem, binarized by fairseq-preprocess: is a sentence long or short?"""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(pipeline.data_bin / "sentencepiece.bpe.model"))
    sentences = [line for line in pipeline.train_text.read_text(encoding="utf-8").splitlines() if 20 < len(line) < 80]
    raw, data = root / "raw", root / "classification"
    raw.mkdir()
    for split, chosen in (("train", sentences[:96]), ("valid", sentences[96:128])):
        encoded = [" ".join(pieces.encode(sentence, out_type=str)) for sentence in chosen]
        (raw / f"{split}.input0").write_text("\n".join(encoded) + "\n", encoding="utf-8")
        labels = ["long" if len(sentence) > 50 else "short" for sentence in chosen]
        (raw / f"{split}.label").write_text("\n".join(labels) + "\n", encoding="utf-8")
    for name, extra in (("input0", ["--srcdict", str(pipeline.data_bin / "dict.txt")]), ("label", [])):
        command = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source", "--workers", "1", *extra]
        command += ["--trainpref", str(raw / f"train.{name}"), "--validpref", str(raw / f"valid.{name}")]
        made = subprocess.run([*command, "--destdir", str(data / name)], capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr[-2000:]
        for file in (data / name).glob(f"*.{name}*"):  # train.input0-None.input0.bin -> train.bin
            file.rename(data / name / f"{file.name.split('.')[0]}.{file.name.split('.')[-1]}")
    return data


def dataset_of(run: Run) -> str:
    """The dataset that a run of :func:`fairseq_train` trained on."""
    return str(run.args[run.args.index("--user-dir") - 1])


def save_dir_of(run: Run) -> Path:
    """The folder of a run of :func:`fairseq_train`: the last one that was passed."""
    words = list(reversed(run.args))
    return Path(words[words.index("--save-dir") - 1])


def fine_tuned(checkpoint: Path, pipeline: Pipeline, root: Path) -> tuple[str, hub.MlsmHubInterface]:
    """Fine-tune with fairseq's own sentence_prediction and classify; the log, and the classifier from the hub."""
    data = classification_data(pipeline, root)
    command = [
        *(sys.executable, "-m", "fairseq_cli.train", data, "--user-dir", PLUGIN, "--save-dir", root / "classifier"),
        *("--task", "sentence_prediction", "--criterion", "sentence_prediction", *TINY_MODEL),
        *("--restore-file", checkpoint, "--reset-optimizer", "--reset-dataloader"),
        *("--reset-meters", "--reset-lr-scheduler", "--num-classes", 2, "--init-token", 0, "--separator-token", 2),
        *("--max-positions", 64, "--required-batch-size-multiple", 1, "--batch-size", 16, "--max-epoch", 1),
        *("--optimizer", "adam", "--lr", "1e-3", "--lr-scheduler", "fixed", "--num-workers", 0, "--cpu"),
        *("--log-format", "simple", "--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"),
        "--no-epoch-checkpoints",
    ]
    run = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment(), check=False
    )
    output = text_of(run)
    assert run.returncode == 0, output[-4000:]
    assert len(re.findall(r"\| valid \|.*accuracy", output)) == 1
    classifier = hub.from_pretrained(
        root / "classifier",
        data_name_or_path=str(data),
        sentencepiece_model=str(pipeline.data_bin / "sentencepiece.bpe.model"),
    )
    with torch.no_grad():
        scores = classifier.predict("sentence_classification_head", classifier.encode("This is a test."))
    assert scores.shape == (1, 2)
    assert float(scores.exp().sum()) == pytest.approx(1, abs=1e-5)
    return output, classifier
