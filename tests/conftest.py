"""A small real run for all tests: text, tokenizer, data, auxiliary model, dictionary, codes."""

from __future__ import annotations

import fcntl
import gzip
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.fairseq_process import run_fairseq_train
from tests.warm_python import warm_commands, warm_python, warm_python_in_module  # noqa: F401  (fixtures)

REPOSITORY = Path(__file__).resolve().parent.parent
PLUGIN = REPOSITORY / "mlsm_plugin"

# a busy machine may take long for an example
settings.register_profile("project", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("project")

# the files that take longest in the slow lane begin first, so that no process is left alone with one at the end
LONGEST = (
    *("huggingface/test_epoch_order.py", "attacks/test_bad_inputs.py", "attacks/test_killed_training.py"),
    *("babylm/test_training.py", "hub/test_other_versions.py", "cli/test_adapt.py"),
    *("attacks/test_killed_commands.py", "attacks/test_faults.py", "docs/test_readme.py"),
    *("runs/test_training_runs.py", "scripts/test_benches.py", "docs/test_huggingface.py"),
    *("cli/test_preprocess.py", "cli/test_pretrain.py", "project/test_without_fairseq.py"),
    *("retrieval/test_key_index.py", "research/test_compare_objectives.py", "docs/test_tutorial.py"),
    *("examples/test_mlsm_example.py", "core/machine/test_memory.py", "cli/test_next_commands.py"),
    *("cli/test_datatrove_step.py", "runs/test_modern_runs.py", "runs/test_npm_runs.py"),
    "runs/test_denoising_runs.py",
)

TINY_MODEL = (
    *("--arch", "mlsm_roberta_tiny", "--encoder-layers", "2", "--encoder-embed-dim", "32"),
    *("--encoder-ffn-embed-dim", "64", "--encoder-attention-heads", "2"),
)
TINY_TRAINING = (
    *("--sample-break-mode", "complete", "--tokens-per-sample", "64", "--skip-invalid-size-inputs-valid-test"),
    *("--optimizer", "adam", "--lr", "1e-3", "--lr-scheduler", "fixed", "--batch-size", "8", "--num-workers", "0"),
    *("--log-format", "simple", "--log-interval", "1", "--seed", "1", "--cpu"),
)


# the criterion of a task, where it is not of the same name
CRITERIONS = {
    "plain_masked_lm": "masked_lm",
    "masked_latent_semantic": "latent_semantic_kl",
    "taco": "token_contrastive",
    "nonparametric_masked_lm": "span_contrastive",
    "span_denoising": "cross_entropy",
    "state_regression": "state_regression",
    "sentence_vectors": "sentence_vectors",
}
WITH_AUXILIARY = ("state_regression", "sentence_vectors")  # tasks that need --auxiliary-checkpoint


if importlib.util.find_spec("fairseq") is None:  # as on Python 3.14: what needs it is skipped
    collect_ignore = ["attacks", "cli", "fairseq_plugin", "retrieval"]
    NEEDS_FAIRSEQ = re.compile(
        r"No module named '(fairseq|spams|omegaconf)|this needs spams|import name .* from 'tests"
    )

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
        report = yield
        if report.failed and NEEDS_FAIRSEQ.search(str(report.longrepr)):
            report.outcome, report.longrepr = "skipped", (str(collector.path), 1, "Skipped: needs fairseq")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, Any]:
        report = yield
        if report.failed and call.excinfo and NEEDS_FAIRSEQ.search(call.excinfo.exconly()):
            report.outcome, report.longrepr = "skipped", (str(item.path), 1, "Skipped: needs fairseq")
        return report


@pytest.hookimpl(trylast=True)  # after the tests of the other lane are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by the place of their file in ``LONGEST``, then those last that need what takes long to make.

    The first file that needs the pipeline stays in front: one process makes it, and the others have other work.
    """
    places = {REPOSITORY / "tests" / name: place for place, name in enumerate(LONGEST)}
    needing = dict.fromkeys(item.path for item in items if "pipeline" in getattr(item, "fixturenames", ()))
    later = set(list(needing)[1:])
    items.sort(
        key=lambda item: (places.get(item.path, len(places)), 1 if item.path in later else -(item.path in needing))
    )


@dataclass(frozen=True)
class Pipeline:
    """Paths of the shared run; read only: copy what a test changes."""

    root: Path
    train_text: Path
    valid_text: Path
    tokenizer: Path
    data_bin: Path
    auxiliary: Path
    dictionary: Path


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that one of the workers of a test run fills by ``make``; the others wait for it and read it."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent  # of all workers of this run
    root, made = shared / name, shared / f".{name}.made"
    root.mkdir(exist_ok=True)
    with open(shared / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            make(root)
            made.touch()
    return root


@pytest.fixture(scope="session")
def english_text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """About 300 kB and 30 kB of real English with document boundaries, from :func:`manual`."""
    root = made_once(tmp_path_factory, "text", _write_english_text)
    return root / "train.txt", root / "valid.txt"


def _write_english_text(root: Path) -> None:
    documents = manual()
    texts = {"train.txt": documents[5:], "valid.txt": documents[:5]}
    for name, chosen in texts.items():
        (root / name).write_text("\n\n".join(chosen) + "\n", encoding="utf-8")


def manual() -> list[str]:
    """The topics of Python's manual, a sentence a line: those of 3.12 (PSF license), whatever Python runs the tests."""
    with gzip.open(REPOSITORY / "tests" / "python_manual.txt.gz", "rt", encoding="utf-8") as file:
        return file.read().removesuffix("\n").split("\n\n")


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Pipeline:
    """The whole chain on a small scale, made by the commands that users type."""
    root = made_once(tmp_path_factory, "pipeline", lambda root: _make_pipeline(_pipeline_at(root, english_text)))
    return _pipeline_at(root, english_text)


def _pipeline_at(root: Path, texts: tuple[Path, Path]) -> Pipeline:
    auxiliary = root / "auxiliary" / "checkpoint_last.pt"
    return Pipeline(root, *texts, root / "tokenizer", root / "data-bin", auxiliary, root / "dictionary")


def _make_pipeline(run: Pipeline) -> None:
    train, valid = run.train_text, run.valid_text
    mlsm("tokenizer", "--input", train, "--vocab-size", 800, "--output", run.tokenizer)
    mlsm("binarize", "--tokenizer", run.tokenizer, "--train", train, "--valid", valid, "--output", run.data_bin)
    mlsm(
        *("auxiliary", run.data_bin, "--save-dir", run.auxiliary.parent, "--max-update", 20),
        *(*TINY_MODEL, *TINY_TRAINING, "--no-progress-bar", "--keep-at", 100),  # one process; each takes seconds
    )
    blocks = ("--tokens-per-sample", 64)
    mlsm(
        *("dictionary", run.data_bin, "--auxiliary", run.auxiliary, "--layer", 2, "--output", run.dictionary),
        *("--atoms", 48, "--tokens", 5000, "--iterations", 20, "--batch-size", 100, *blocks),
    )
    mlsm("encode", run.data_bin, "--auxiliary", run.auxiliary, "--dictionary", run.dictionary, *blocks)


def mlsm(*arguments: object) -> None:
    """Run an ``mlsm`` command in this process; it must succeed."""
    from mlsm_plugin.cli.main import main  # here, since the process that shares out the tests needs no package

    status = main([str(argument) for argument in arguments])
    assert status == 0, f"mlsm {arguments} ended with {status}"


def failing_mlsm(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run an ``mlsm`` command that must fail; returns its one line of standard error."""
    from mlsm_plugin.cli.main import main

    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    stderr = capsys.readouterr().err
    lines = [line for line in stderr.splitlines() if line.startswith("mlsm: error: ")]
    assert status == 1
    assert len(lines) == 1, stderr
    return lines[0]


def fairseq_train(
    data: object, save_dir: object, *flags: object, task: str = "masked_latent_semantic", check: bool = True,
    user_dir: object = PLUGIN, cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run fairseq-train as a user does, on a tiny model; later flags override earlier ones."""
    criterion = CRITERIONS.get(task, task)
    words = [
        *(data, "--user-dir", user_dir, "--save-dir", save_dir),
        *("--task", task, "--criterion", criterion, *TINY_MODEL, *TINY_TRAINING, "--no-epoch-checkpoints", *flags),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = run_fairseq_train([str(word) for word in words], environment=environment, cwd=cwd)
    assert not check or result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def logged(result: subprocess.CompletedProcess[str], name: str, *, where: str = "train_inner") -> list[str]:
    """The values of a metric as fairseq printed them, in order (``where``: train_inner, train or valid)."""
    output = result.stdout + result.stderr
    pattern = re.compile(rf"\b{name}[= ]([-+.\de]+)")
    lines = [line for line in output.splitlines() if f"| {where} |" in line]
    return [match.group(1) for line in lines if (match := pattern.search(line))]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> object:
    """A ``TinyData``: a dataset of 120 lines and a model with random weights, in about a second."""
    from tests.tiny_models import make_tiny_data

    return make_tiny_data(tmp_path_factory.mktemp("tiny"), english_text[0])


@pytest.fixture(scope="session")
def hf_tokenizers(english_text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a small Hugging Face tokenizer of each kind."""
    from tests.tiny_hf_models import TOKENIZERS, make_tokenizer

    def make(root: Path) -> None:
        for kind in TOKENIZERS:
            make_tokenizer(kind, english_text[0], root / kind)

    root = made_once(tmp_path_factory, "hf_tokenizers", make)
    return {kind: root / kind for kind in TOKENIZERS}
