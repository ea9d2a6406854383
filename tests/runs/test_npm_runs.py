"""Whole training runs with the span contrastive loss, started as users start them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from fairseq import tasks

from mlsm_plugin import hub
from tests.conftest import Pipeline, fairseq_train, logged
from tests.runs.training_runs import (
    NO_DROPOUT,
    Run,
    assert_fp16_starts_alike,
    assert_loaders_change_nothing,
    assert_same_updates,
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

GROUPS = ("--group-size", 4, "--batch-size", 2, "--required-batch-size-multiple", 1, "--tokens-per-sample", 48)
NPM = ("--task", "nonparametric_masked_lm", "--criterion", "span_contrastive", *GROUPS)
METRICS = (
    *("loss", "start_loss", "end_loss", "start_accuracy", "end_accuracy", "accuracy"),
    *("spans_per_group", "span_length", "masked_share", "groups_without_spans"),
)


@pytest.fixture(scope="module")
def runs(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Runs that do not depend on each other, two at a time; a test waits for those that it looks at."""
    root = tmp_path_factory.mktemp("npm")
    train = partial(
        fairseq_train, pipeline.data_bin, root, *GROUPS, *NO_DROPOUT, "--max-update", 4, task="nonparametric_masked_lm"
    )
    short = partial(train, "--no-save", "--disable-validation")
    calls = {
        "trained": partial(train, "--save-dir", root / "model", "--max-positions", 64),
        "two loaders": partial(train, "--no-save", "--num-workers", 2, "--max-positions", 64),
        "fp16": partial(train, "--no-save", "--memory-efficient-fp16", "--max-positions", 64),
        "single": partial(train, "--save-dir", root / "single", "--span-mode", "single", "--disable-validation"),
        "shared": partial(short, "--span-mask-symbols", "shared", "--similarity", "l2"),
        "masked context": partial(short, "--context-masking-ratio", 1, "--group-by", "random"),
        "warm": partial(short, "--finetune-from-model", pipeline.auxiliary, "--max-positions", 64),
        "whole": partial(short, "--max-update", 6),
        "longer": partial(short, "--max-update", 60, "--lr", "5e-3"),
    }
    with two_at_a_time(calls) as started:
        yield started


def test_logged_metrics_are_there_and_agree_with_each_other(runs: dict[str, Future[Run]]) -> None:
    run = runs["trained"].result()
    for where in ("train_inner", "train", "valid"):
        values = {metric: float(logged(run, metric, where=where)[0]) for metric in METRICS}
        assert values["loss"] == pytest.approx(values["start_loss"] + values["end_loss"], abs=2e-3)
        both, start, end = (values[name] for name in ("accuracy", "start_accuracy", "end_accuracy"))
        assert 0 <= both <= min(start, end) <= max(start, end) <= 1
        assert 1 <= values["span_length"] <= 10
        assert 0.05 < values["masked_share"] <= 0.16
        assert values["spans_per_group"] * values["span_length"] < 4 * 48 * 0.16
        assert values["groups_without_spans"] == 0


def test_retrieval_becomes_better_than_chance(runs: dict[str, Future[Run]]) -> None:
    run = runs["longer"].result()
    losses = [float(value) for value in logged(run, "loss")]
    assert sum(losses[-10:]) / 10 < sum(losses[:5]) / 5 - 0.5
    assert losses[0] == pytest.approx(2 * math.log2(7 * 45), rel=0.2)  # seven other blocks, few occurrences in them


def test_number_of_loader_processes_does_not_change_training(runs: dict[str, Future[Run]]) -> None:
    assert_loaders_change_nothing(runs)


def test_half_precision_run_starts_as_float32_does(runs: dict[str, Future[Run]]) -> None:
    assert_fp16_starts_alike(runs, "loss", rel=2e-3)


def test_each_way_of_masking_and_comparing_trains(runs: dict[str, Future[Run]]) -> None:
    for name in ("single", "shared", "masked context"):
        run = runs[name].result()
        assert len(logged(run, "loss")) == 4
        assert all(float(norm) > 0 for norm in logged(run, "gnorm"))
    single = runs["single"].result()
    assert logged(single, "end_loss") == []
    assert set(logged(single, "span_length")) == {"1"}
    assert logged(single, "start_loss") == logged(single, "loss")


def test_masked_lm_checkpoint_is_continued_with_the_masks_of_its_mask(
    runs: dict[str, Future[Run]], pipeline: Pipeline
) -> None:
    warm = runs["warm"].result()
    assert "embed_tokens.weight: 2 symbols are new, and start as copies of <mask>" in text_of(warm)
    assert logged(warm, "loss")[0] != logged(runs["trained"].result(), "loss")[0]
    flags = (*NPM, "--max-positions", 64)
    cfg = training_config(pipeline.data_bin, *flags)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    state = torch.load(pipeline.auxiliary, weights_only=True)["model"]
    model.load_state_dict(state, strict=True)
    embeddings = model.encoder.sentence_encoder.embed_tokens.weight
    assert len(embeddings) == len(state["encoder.sentence_encoder.embed_tokens.weight"]) + 2
    assert torch.equal(embeddings[-2:], embeddings[task.mask_idx].expand(2, -1))


def test_run_that_is_stopped_and_resumes_equals_one_without_a_break(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path
) -> None:
    words = (pipeline.data_bin, tmp_path, *GROUPS, *NO_DROPOUT, "--disable-validation")
    stopped = updates_of_a_stopped_run(*words, task="nonparametric_masked_lm")
    assert stopped == updates_in(text_of(runs["whole"].result()))


def number_of_blocks(pipeline: Pipeline) -> int:
    cfg = training_config(pipeline.data_bin, *GROUPS, task="nonparametric_masked_lm", criterion="span_contrastive")
    task = tasks.setup_task(cfg.task)
    task.load_dataset("valid")
    return sum(len(group) for group in task.dataset("valid").groups)


@pytest.mark.parametrize("across", [True, False])
def test_two_ranks_compute_what_one_rank_computes_from_both_their_groups(
    pipeline: Pipeline, tmp_path: Path, across: bool
) -> None:
    """Two groups are the whole dataset, so that one rank and two ranks see the same of them in each update."""
    half = ("--group-size", number_of_blocks(pipeline) // 2 + 1, "--train-subset", "valid", "--disable-validation")
    flags = (*NPM, *NO_DROPOUT, *half, "--max-epoch", 3, "--clip-norm", 1.0, "--no-save")
    sharing = ("--negatives-across-ranks",) if across else ()
    ranks = train_on_two_ranks(
        *(pipeline.data_bin, tmp_path, *flags, *sharing, "--batch-size", 1, "--ddp-backend", "legacy_ddp")
    )
    together = ("--batch-size", 2) if across else ("--batch-size", 1, "--update-freq", 2)
    alone = fairseq_train(pipeline.data_bin, tmp_path, *flags, *together)
    for rank in ranks:
        assert rank.returncode == 0, rank.stdout[-4000:]
    assert_same_updates(updates_in(ranks[0].stdout), updates_in(text_of(alone)), 3)


def test_rank_without_a_batch_and_ranks_that_share_nothing(pipeline: Pipeline, tmp_path: Path) -> None:
    third = ("--group-size", number_of_blocks(pipeline) // 3 + 1, "--train-subset", "valid", "--disable-validation")
    flags = (*NPM, *NO_DROPOUT, *third, "--max-epoch", 1, "--no-save", "--batch-size", 1, "--ddp-backend", "legacy_ddp")
    everything = train_on_two_ranks(pipeline.data_bin, tmp_path, *flags, "--negatives-across-ranks")
    groups_of_one = ("--negatives-across-ranks", "--negative-group-size", 1)
    own = [train_on_two_ranks(pipeline.data_bin, tmp_path, *flags, *more) for more in (groups_of_one, ())]
    for rank in (*everything, *own[0], *own[1]):
        assert rank.returncode == 0, rank.stdout[-4000:]
    found, alone, without = (updates_in(ranks[0].stdout) for ranks in (everything, *own))
    assert list(found) == [1, 2]  # three groups: the second rank has none in the second update
    assert alone == without
    assert float(found[1]["loss"]) > float(alone[1]["loss"]) + 0.3  # more tokens to choose from
    assert found[2]["loss"] != "0"


def test_loaded_model_fills_masks_with_phrases_and_is_fine_tuned(
    runs: dict[str, Future[Run]], pipeline: Pipeline, tmp_path: Path
) -> None:
    folder = save_dir_of(runs["trained"].result())
    model = hub.from_pretrained(folder)
    assert model.extract_features(model.encode("The statement.")).size(-1) == 32
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    output, classifier = fine_tuned(moved / "checkpoint_last.pt", pipeline, tmp_path)
    assert "sentence_classification_head" in "".join(classifier.model.classification_heads)
    assert "the checkpoint's <mask_s> and <mask_e> are not used by this task and are left out" in output


def test_corpora_without_repetition_and_other_tasks_are_refused_in_one_line(pipeline: Pipeline, tmp_path: Path) -> None:
    data = shutil.copytree(pipeline.data_bin, tmp_path / "data", ignore=shutil.ignore_patterns("*.codes"))
    other = fairseq_train(
        *(data, tmp_path / "other", "--task", "masked_lm", "--criterion", "span_contrastive", "--no-save"), check=False
    )
    assert other.returncode == 1
    assert "error: --criterion span_contrastive needs --task nonparametric_masked_lm" in other.stderr
    from fairseq.data import indexed_dataset

    builder = indexed_dataset.make_builder(str(data / "train.bin"), "mmap", vocab_size=800)
    for first in range(10, 700, 20):  # every piece once
        builder.add_item(torch.tensor([*range(first, first + 20), 2]))
    builder.finalize(str(data / "train.idx"))
    run = fairseq_train(data, tmp_path / "none", *GROUPS, task="nonparametric_masked_lm", check=False)
    assert run.returncode == 1
    assert "groups of train have no span that occurs in two of their blocks: there is nothing to learn" in run.stderr
    for result in (other, run):
        assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("*/*.pt"))
