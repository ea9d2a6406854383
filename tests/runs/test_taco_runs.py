"""Whole training runs with the token contrastive loss, started as users start them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from fairseq import tasks

from mlsm_plugin import hub
from tests.conftest import Pipeline, fairseq_train, logged
from tests.runs.training_runs import (
    NO_DROPOUT,
    Run,
    assert_fp16_starts_alike,
    assert_loaders_change_nothing,
    assert_same_updates,
    dataset_of,
    fine_tuned,
    save_dir_of,
    text_of,
    train_on_two_ranks,
    two_at_a_time,
    updates_in,
    updates_of_a_stopped_run,
)
from tests.tiny_run import training_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python")]

TACO = ("--task", "taco", "--criterion", "token_contrastive", "--arch", "taco_small")
METRICS = ("loss", "mlm_loss", "mlm_ppl", "contrastive_loss", "contrastive_accuracy", "alignment", "negative_cosine")


@pytest.fixture(scope="module")
def runs(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Runs that do not depend on each other, two at a time; a test waits for those that it looks at."""
    root = tmp_path_factory.mktemp("taco")
    own_data = shutil.copytree(pipeline.data_bin, root / "data-bin", ignore=shutil.ignore_patterns("*.codes"))
    # fairseq drops what is longer than a sample, so that samples must not end with sentences
    compared = ("--sample-break-mode", "none", "--update-freq", 2, "--validate-interval-updates", 3, "--dropout", 0.2)
    train = partial(fairseq_train, pipeline.data_bin, root, "--arch", "taco_small", "--no-save", task="taco")
    short = partial(train, "--max-update", 4)
    calls = {
        "trained": partial(
            fairseq_train, own_data, root / "model", "--arch", "taco_small", "--max-update", 4, task="taco"
        ),
        "two loaders": partial(short, "--num-workers", 2),
        "fp16": partial(short, "--memory-efficient-fp16"),
        "weight 2": partial(short, "--contrastive-weight", 2, "--contrastive-anchors", "masked"),
        "warm": partial(short, "--arch", "mlsm_roberta_tiny", "--finetune-from-model", pipeline.auxiliary),
        "unused": partial(short, *compared, "--contrastive-weight", 0),
        "plain": partial(short, *compared, task="plain_masked_lm"),
        "whole": partial(train, "--max-update", 6),
        "longer": partial(train, "--max-update", 60, "--lr", "5e-3", "--disable-validation"),
    }
    with two_at_a_time(calls) as started:
        yield started


def test_logged_metrics_are_there_and_agree_with_each_other(runs: dict[str, Future[Run]]) -> None:
    for name, weight in (("trained", 1), ("weight 2", 2)):
        for where in ("train_inner", "train", "valid"):
            run = runs[name].result()
            values = {metric: float(logged(run, metric, where=where)[0]) for metric in METRICS}
            assert values["mlm_ppl"] == pytest.approx(2 ** values["mlm_loss"], rel=3e-3)
            expected = values["mlm_loss"] + weight * values["contrastive_loss"]
            assert values["loss"] == pytest.approx(expected, abs=3e-3)
            assert 0 <= values["contrastive_accuracy"] <= 1
            assert max(abs(values["negative_cosine"]), abs(values["alignment"])) <= 1


def test_contrastive_loss_falls_below_that_of_chance(runs: dict[str, Future[Run]]) -> None:
    run = runs["longer"].result()
    losses = [float(value) for value in logged(run, "contrastive_loss")]
    assert max(losses[-5:]) < math.log2(51) < losses[0]
    assert min(float(value) for value in logged(run, "contrastive_accuracy")[-5:]) > 2 / 51


def test_number_of_loader_processes_does_not_change_training(runs: dict[str, Future[Run]]) -> None:
    assert_loaders_change_nothing(runs)


def test_half_precision_run_starts_as_float32_does(runs: dict[str, Future[Run]]) -> None:
    assert_fp16_starts_alike(runs, "mlm_loss", "contrastive_loss")


def test_without_weight_it_trains_as_masked_lm_and_logs_the_contrastive_metrics(runs: dict[str, Future[Run]]) -> None:
    ours, plain = runs["unused"].result(), runs["plain"].result()
    assert len(logged(plain, "loss")) == 4
    for name, where in (("loss", "train_inner"), ("gnorm", "train_inner"), ("loss", "valid")):
        assert logged(ours, name, where=where) == logged(plain, name, where=where)
    assert float(logged(ours, "contrastive_loss")[0]) > 1


def test_masked_lm_checkpoint_is_continued(runs: dict[str, Future[Run]]) -> None:
    cold, warm = runs["trained"].result(), runs["warm"].result()
    assert float(logged(warm, "mlm_loss")[0]) < float(logged(cold, "mlm_loss")[0]) - 0.3


def test_run_that_is_stopped_and_resumes_equals_one_without_a_break(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path
) -> None:
    words = (pipeline.data_bin, tmp_path, "--arch", "taco_small")
    stopped = updates_of_a_stopped_run(*words, task="taco")
    assert stopped == updates_in(text_of(runs["whole"].result()))


def test_two_ranks_compute_what_one_rank_computes_from_both_their_batches(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = (*TACO, *NO_DROPOUT, "--max-update", 3, "--clip-norm", 1.0, "--contrastive-anchors", "unmasked")
    ranks = train_on_two_ranks(pipeline.data_bin, tmp_path / "two", "--ddp-backend", "legacy_ddp", *flags)
    alone = fairseq_train(pipeline.data_bin, tmp_path / "one", "--update-freq", 2, *flags, "--no-save", task="taco")
    for rank in ranks:
        assert rank.returncode == 0, rank.stdout[-4000:]
    assert_same_updates(updates_in(ranks[0].stdout), updates_in(text_of(alone)), 3)


def test_ranks_with_one_sequence_each_and_a_rank_without_share_their_negatives(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    cfg = training_config(pipeline.data_bin, task="taco", criterion="token_contrastive")
    task = tasks.setup_task(cfg.task)
    task.load_dataset("valid")
    num_blocks = len(task.dataset("valid"))
    size = num_blocks // 3 + 1  # three batches: the second rank has none in the second update
    flags = (
        *TACO,
        "--ddp-backend",
        "legacy_ddp",
        "--negatives-across-ranks",
        "--no-save",
        "--train-subset",
        "valid",
        "--disable-validation",
    )
    for extra, last in ((("--batch-size", 1, "--max-update", 2), 2), (("--batch-size", size, "--max-epoch", 1), 2)):
        words = (*flags, "--train-subset", "valid", "--required-batch-size-multiple", 1, *extra)
        ranks = train_on_two_ranks(pipeline.data_bin, tmp_path, *words)
        for rank in ranks:
            assert rank.returncode == 0, rank.stdout[-4000:]
        updates = updates_in(ranks[0].stdout)
        assert list(updates) == list(range(1, last + 1))
        assert all(float(values["contrastive_loss"]) > 1 for values in updates.values())


def test_loaded_model_fills_masks_has_no_latent_properties_and_is_fine_tuned(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path
) -> None:
    run = runs["trained"].result()
    shutil.rmtree(dataset_of(run))
    moved = shutil.copytree(save_dir_of(run), tmp_path / "elsewhere")
    model = hub.from_pretrained(moved)
    assert model.num_atoms == 0
    filled = model.fill_mask("The <mask> is executed.", topk=3)
    assert len(filled) == 3
    assert filled[0][1] >= filled[2][1] > 0
    assert model.extract_features(model.encode("The statement.")).size(-1) == 32
    with pytest.raises(ValueError, match="no latent properties"):
        model.latent_properties("The <mask> is executed.")

    _, classifier = fine_tuned(moved / "checkpoint_last.pt", pipeline, tmp_path)
    assert classifier.num_atoms == 0


def test_criterion_of_another_task_is_refused_in_one_line(pipeline: Pipeline, tmp_path: Path) -> None:
    run = fairseq_train(
        *(pipeline.data_bin, tmp_path, "--task", "masked_lm", "--criterion", "token_contrastive", "--no-save"),
        check=False,
    )
    assert run.returncode == 1
    assert "error: --criterion token_contrastive needs --task taco" in run.stderr
    assert "Traceback" not in run.stderr
