"""Whole training runs of span denoising, from binarizing to infilling, started as users start them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch

from mlsm_plugin import hub
from tests.conftest import Pipeline, fairseq_train, logged
from tests.denoising_flags import TINY
from tests.runs.training_runs import (
    NO_DROPOUT,
    Run,
    assert_fp16_starts_alike,
    assert_loaders_change_nothing,
    assert_same_updates,
    save_dir_of,
    text_of,
    train_on_two_ranks,
    two_at_a_time,
    updates_in,
    updates_of_a_stopped_run,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python")]

Capture = pytest.CaptureFixture[str]
DENOISING = ("--task", "span_denoising", "--criterion", "cross_entropy", *TINY)


@pytest.fixture(scope="module")
def runs(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Runs that do not depend on each other, two at a time; a test waits for those that it looks at."""
    root = tmp_path_factory.mktemp("denoising")
    short = ("--max-update", 4, "--no-save")
    smoothed = ("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1)
    train = partial(fairseq_train, pipeline.data_bin, root, *TINY, *NO_DROPOUT, task="span_denoising")
    unsaved = partial(train, *short)
    calls = {
        "trained": partial(train, "--save-dir", root / "model", "--max-update", 4),
        "two loaders": partial(unsaved, "--num-workers", 2),
        "fp16": partial(unsaved, "--memory-efficient-fp16"),
        "rotated words": partial(unsaved, "--rotate", "--closing-sentinel", "--mask-whole-words", *smoothed),
        "sentences": partial(unsaved, "--sample-break-mode", "eos"),
        "whole": partial(train, "--max-update", 6, "--no-save", "--disable-validation"),
        "longer": partial(train, "--max-update", 50, "--lr", "5e-3", "--no-save", "--disable-validation"),
    }
    with two_at_a_time(calls) as started:
        yield started


def test_loss_falls_with_every_kind_of_noise(runs: dict[str, Future[Run]]) -> None:
    longer = [float(value) for value in logged(runs["longer"].result(), "loss")]
    assert sum(longer[-5:]) / 5 < longer[0] - 1.5
    for name in ("rotated words", "sentences"):
        run = runs[name].result()
        assert len(logged(run, "loss")) == 4
        assert all(float(norm) > 0 for norm in logged(run, "gnorm"))
    assert "nll_loss" in text_of(runs["rotated words"].result())


def test_number_of_loader_processes_does_not_change_training(runs: dict[str, Future[Run]]) -> None:
    assert_loaders_change_nothing(runs)


def test_half_precision_run_starts_as_float32_does(runs: dict[str, Future[Run]]) -> None:
    assert_fp16_starts_alike(runs, "loss")


def test_run_that_is_stopped_and_resumes_equals_one_without_a_break(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path
) -> None:
    words = (pipeline.data_bin, tmp_path, *TINY, *NO_DROPOUT, "--disable-validation")
    assert updates_of_a_stopped_run(*words, task="span_denoising") == updates_in(text_of(runs["whole"].result()))


def test_two_ranks_compute_what_one_rank_computes_from_both_their_batches(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = (*DENOISING, *NO_DROPOUT, "--max-update", 3, "--clip-norm", 1.0, "--disable-validation")
    ranks = train_on_two_ranks(pipeline.data_bin, tmp_path / "two", "--ddp-backend", "legacy_ddp", *flags)
    alone = fairseq_train(pipeline.data_bin, tmp_path / "one", "--update-freq", 2, *flags, "--no-save")
    for rank in ranks:
        assert rank.returncode == 0, rank.stdout[-4000:]
    assert_same_updates(updates_in(ranks[0].stdout), updates_in(text_of(alone)), 3)


def test_texts_of_one_token_are_left_out_and_counted_and_long_ones_cut(pipeline: Pipeline, tmp_path: Path) -> None:
    from fairseq.data import indexed_dataset

    data = shutil.copytree(pipeline.data_bin, tmp_path / "data", ignore=shutil.ignore_patterns("*.codes"))
    for split, lengths in (("train", [1, 0, 2, 30, 100, 9]), ("valid", [1, 0])):
        builder = indexed_dataset.make_builder(str(data / f"{split}.bin"), "mmap", vocab_size=800)
        for length in lengths:
            builder.add_item(torch.tensor([*range(10, 10 + length), 2]))
        builder.finalize(str(data / f"{split}.idx"))
    flags = (*TINY, *NO_DROPOUT, "--sample-break-mode", "eos", "--max-update", 1, "--no-save")
    run = fairseq_train(data, tmp_path, *flags, "--disable-validation", task="span_denoising")
    assert "train: 1 texts of one token are left out" in text_of(run)
    assert text_of(run).count("left out") == 1
    length = int(re.findall(r"train: (\d+) texts of at most (\d+) tokens", text_of(run))[0][1])
    assert f"train: {4 + -(-100 // length)} texts of at most {length} tokens" in text_of(run)  # 2, 30, 9 and 1, too
    assert len(updates_in(text_of(run))) == 1
    failed = fairseq_train(data, tmp_path, *flags, task="span_denoising", check=False)
    assert failed.returncode == 1
    assert "no text of valid can be corrupted" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_checkpoint_with_another_number_of_sentinels_is_refused(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path
) -> None:
    model = save_dir_of(runs["trained"].result())
    words = (pipeline.data_bin, tmp_path, *TINY, "--finetune-from-model", model / "checkpoint_last.pt", "--no-save")
    failed = fairseq_train(*words, "--sentinels", 20, task="span_denoising", check=False)
    assert failed.returncode == 1
    assert "the checkpoint has 100 sentinels and" in failed.stderr
    assert "--sentinels is 20" in failed.stderr
    assert "Traceback" not in failed.stderr
    with pytest.raises(ValueError, match="the checkpoint has 100 sentinels"):
        hub.from_pretrained(model, sentinels=30)
    again = fairseq_train(*words, "--max-update", 1, "--disable-validation", task="span_denoising")
    first = float(logged(runs["trained"].result(), "loss")[0])
    assert float(logged(again, "loss")[0]) < first
