"""Whole training runs, started as users start them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

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
    command_of,
    dataset_of,
    fine_tuned,
    save_dir_of,
    text_of,
    train_on_two_ranks,
    train_until_killed,
    two_at_a_time,
    updates_in,
)
from tests.tiny_run import each_batch, in_torch_ddp, seeded_model, training_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Runs that do not depend on each other, two at a time; a test waits for those that it looks at."""
    root = tmp_path_factory.mktemp("runs")
    own_data = shutil.copytree(pipeline.data_bin, root / "data-bin")
    second = second_data_folder(pipeline, root / "second")
    accumulated = ("--update-freq", 2, "--dropout", 0.2, "--attention-dropout", 0.2)
    # fairseq drops what is longer than a sample, so that samples must not end with sentences
    compared = ("--sample-break-mode", "none", "--max-update", 8, "--validate-interval-updates", 3)
    mlm_only = ("--latent-weight", 0, "--mlm-weight", 1)
    both = ("--mlm-weight", 1, "--max-update", 4)
    loading = ("--max-update", 1, "--batch-size", 64, "--data-buffer-size", 100, "--disable-validation")
    train = partial(fairseq_train, pipeline.data_bin, root, "--no-save")
    plain = partial(train, *compared, task="plain_masked_lm")
    two_folders = f"{pipeline.data_bin}:{second}"
    calls = {
        "trained": partial(fairseq_train, own_data, root / "model", *both),
        "two loaders": partial(train, *both, "--num-workers", 2),
        "fp16": partial(train, *both, "--memory-efficient-fp16"),
        "warm": partial(train, *both, "--finetune-from-model", pipeline.auxiliary),
        "argmax": partial(
            *(train, "--latent-target", "argmax", "--latent-weight", 0.5, "--mlm-weight", 2, "--max-update", 3)
        ),
        "two folders": partial(*(fairseq_train, two_folders, root, "--max-epoch", 3, "--batch-size", 200, "--no-save")),
        "mlm only": partial(train, *compared, *mlm_only),
        "mlm only, accumulated": partial(train, *compared, *mlm_only, *accumulated),
        "plain": plain,
        "plain, accumulated": partial(plain, *accumulated),
        "ends while loading": partial(train, *loading),
        "ends while loading, again": partial(train, *loading),
    }
    with two_at_a_time(calls) as started:
        yield started


def second_data_folder(pipeline: Pipeline, folder: Path) -> Path:
    """A dataset whose training split is the validation split of the shared one."""
    folder.mkdir()
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        shutil.copy(pipeline.data_bin / name, folder)
    for suffix in ("idx", "bin"):
        shutil.copy(pipeline.data_bin / f"valid.{suffix}", folder / f"train.{suffix}")
    shutil.copytree(pipeline.data_bin / "valid.codes", folder / "train.codes")
    return folder


@pytest.mark.parametrize("variant", ["", ", accumulated"])
def test_training_without_latent_loss_equals_plain_masked_lm_update_for_update(
    runs: dict[str, Future[Run]], variant: str
) -> None:
    ours, plain = runs["mlm only" + variant].result(), runs["plain" + variant].result()
    assert len(logged(plain, "loss")) == 8
    assert logged(ours, "loss") == logged(plain, "loss")
    assert logged(ours, "gnorm") == logged(plain, "gnorm")
    assert len(logged(plain, "loss", where="valid")) == 3
    assert logged(ours, "loss", where="valid") == logged(plain, "loss", where="valid")
    assert logged(ours, "mlm_ppl", where="valid") == logged(plain, "ppl", where="valid")


def test_run_that_ends_while_batches_are_being_loaded_ends_well(runs: dict[str, Future[Run]]) -> None:
    # the exit status is checked by fairseq_train; without version_shims two of three abort
    for name in ("ends while loading", "ends while loading, again"):
        assert len(logged(runs[name].result(), "loss")) == 1


def test_every_epoch_masks_other_tokens_whatever_process_loads_them(pipeline: Pipeline) -> None:
    cfg = training_config(pipeline.data_bin)

    def masks_of_epochs(num_workers: int) -> list[dict[int, list[int]]]:
        task = tasks.setup_task(cfg.task)
        task.load_dataset("valid")
        iterator = task.get_batch_iterator(
            task.dataset("valid"), max_sentences=8, max_positions=10_000, seed=1, num_workers=num_workers
        )
        epochs = []
        for _ in range(3):
            samples = list(iterator.next_epoch_itr(shuffle=True))
            rows = [row for sample in samples for row in zip(sample["id"], sample["target"], strict=True)]
            epochs.append({int(index): target[target != 1].tolist() for index, target in rows})
        return epochs

    epochs = masks_of_epochs(num_workers=1)
    assert epochs[0].keys() == epochs[1].keys()
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs == masks_of_epochs(num_workers=0)


@pytest.mark.usefixtures("warm_python")
def test_run_that_is_killed_and_restarted_equals_one_without_a_break(pipeline: Pipeline, tmp_path: Path) -> None:
    flags = ("--mlm-weight", 1, "--train-subset", "valid", "--batch-size", 8, "--max-epoch", 2)
    flags = (*flags, "--save-interval-updates", 2, "--num-workers", 1)
    expected = train_until_killed(command_of(pipeline.data_bin, tmp_path / "whole", *flags), None)
    per_epoch = len(expected) // 2
    assert per_epoch > 10

    found: dict[int, dict[str, str]] = {}
    for stop_after in (per_epoch // 2, per_epoch + per_epoch // 2, None):  # once in each epoch, then to the end
        part = train_until_killed(command_of(pipeline.data_bin, tmp_path / "stopped", *flags), stop_after)
        assert part, "a restarted run printed no update"
        assert stop_after is None or max(part) < len(expected)
        assert min(part) <= max(found, default=0) + 1
        for update, values in part.items():
            assert found.setdefault(update, values) == values
    assert found == expected


@pytest.mark.usefixtures("warm_python")
def test_two_ranks_compute_what_one_rank_computes_from_both_their_batches(pipeline: Pipeline, tmp_path: Path) -> None:
    """They also resume."""
    flags = (*NO_DROPOUT, "--mlm-weight", 1, "--clip-norm", 1.0)
    found = {}
    for last in (3, 5):
        more = ("--ddp-backend", "legacy_ddp", "--max-update", last)
        ranks = train_on_two_ranks(pipeline.data_bin, tmp_path / "two", *flags, *more)
        for rank in ranks:
            assert rank.returncode == 0, rank.stdout[-4000:]
        found |= updates_in(ranks[0].stdout)
    more = ("--update-freq", 2, "--max-update", 5, "--no-save")
    alone = fairseq_train(pipeline.data_bin, tmp_path / "one", *flags, *more)
    assert_same_updates(found, updates_in(text_of(alone)), 5)
    kept = {path.name for path in (tmp_path / "two").iterdir()}
    assert {"checkpoint_last.pt", "dict.txt", "sentencepiece.bpe.model"} <= kept


def test_number_of_loader_processes_does_not_change_training(runs: dict[str, Future[Run]]) -> None:
    assert_loaders_change_nothing(runs)
    alone, helped = runs["trained"].result(), runs["two loaders"].result()
    for name in ("kl", "mlm_loss"):
        assert logged(helped, name, where="valid") == logged(alone, name, where="valid")


@pytest.mark.parametrize(("latent_weight", "mlm_weight"), [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("flags", [(), ("--untie-weights-roberta",)])
def test_every_parameter_takes_part_in_every_step_as_torch_ddp_demands(
    pipeline: Pipeline, tmp_path: Path, latent_weight: int, mlm_weight: int, flags: tuple[str, ...]
) -> None:
    # fairseq's --ddp-backend pytorch_ddp passes device_ids, which torch refuses on the CPU: so its wrapper, by hand
    cfg = training_config(pipeline.data_bin, "--latent-weight", latent_weight, "--mlm-weight", mlm_weight, *flags)
    task = tasks.setup_task(cfg.task)
    model = seeded_model(cfg, task)
    criterion = task.build_criterion(cfg.criterion)
    samples = islice(each_batch(cfg, "valid", task=task), 3)

    def train(wrapped: Any) -> None:
        for sample in samples:  # the second forward pass raises where the first left a parameter out
            loss, _, _ = criterion(wrapped, sample)
            loss.backward()

    in_torch_ddp(model, tmp_path, train)
    assert [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ] == []


def test_half_precision_run_starts_as_float32_does(runs: dict[str, Future[Run]]) -> None:
    # --fp16 needs CUDA and --bf16 without CUDA means a TPU to fairseq; bf16 runs in test_hydra.py
    assert_fp16_starts_alike(runs, "kl", "mlm_loss")


@pytest.mark.parametrize(("name", "latent_weight", "mlm_weight"), [("trained", 1, 1), ("argmax", 0.5, 2)])
def test_logged_metrics_are_there_and_agree_with_each_other(
    runs: dict[str, Future[Run]], name: str, latent_weight: float, mlm_weight: float
) -> None:
    for where in ("train_inner", "train", "valid"):
        values = {
            metric: float(logged(runs[name].result(), metric, where=where)[0])
            for metric in ("loss", "kl", "nonzeros", "coded", "latent_ppl", "mlm_loss", "mlm_ppl")
        }
        assert values["latent_ppl"] == pytest.approx(2 ** values["kl"], rel=3e-3, abs=0.006)
        assert values["mlm_ppl"] == pytest.approx(2 ** values["mlm_loss"], rel=3e-3)
        assert values["loss"] == pytest.approx(latent_weight * values["kl"] + mlm_weight * values["mlm_loss"], rel=3e-3)
        assert 0.5 < values["coded"] <= 1  # end-of-sentence is masked too, and has no code
        assert 1 <= values["nonzeros"] <= 48


def test_data_folders_joined_by_a_colon_are_used_in_turn(runs: dict[str, Future[Run]]) -> None:
    run = runs["two folders"].result()
    updates = [0, *(int(number) for number in logged(run, "num_updates", where="train"))]
    first_epoch, second_epoch, third_epoch = (after - before for before, after in pairwise(updates))
    assert second_epoch <= 2  # 98 sentences
    assert first_epoch == third_epoch > 5
    assert len(logged(run, "kl", where="valid")) == 3


def test_masked_lm_checkpoint_warms_up_a_latent_semantic_model(runs: dict[str, Future[Run]]) -> None:
    cold, warm = runs["trained"].result(), runs["warm"].result()
    assert text_of(warm).count("the checkpoint has no latent head: a new one is initialized at random") == 1
    assert "latent head" not in text_of(cold)
    assert float(logged(warm, "mlm_loss")[0]) < float(logged(cold, "mlm_loss")[0]) - 0.3


@pytest.fixture(scope="module")
def trained(runs: dict[str, Future[Run]]) -> Path:
    """A folder with a trained model; its dataset and codes are gone."""
    run = runs["trained"].result()
    shutil.rmtree(dataset_of(run))
    return save_dir_of(run)


def test_loading_a_trained_model_needs_nothing_but_its_folder(trained: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(trained, tmp_path / "elsewhere")
    model = hub.from_pretrained(moved)
    assert model.num_atoms == 48
    distribution = model.latent_distribution(model.encode("The statement is executed."))
    assert distribution.shape[-1] == 48
    assert torch.allclose(distribution.sum(dim=-1), torch.ones(()), atol=1e-5)
    assert [len(token.atoms) for token in model.latent_properties("a <mask> here", topk=3)].count(3) >= 3


@pytest.mark.usefixtures("warm_python")
def test_trained_model_is_fine_tuned_by_stock_sentence_prediction_and_classifies_from_the_hub(
    trained: Path, pipeline: Pipeline, tmp_path: Path
) -> None:
    output, classifier = fine_tuned(trained / "checkpoint_last.pt", pipeline, tmp_path)
    assert output.count("the checkpoint's latent head is not used by this task and is left out") == 1
    assert "lm_head.atom_projection" not in output
    assert classifier.num_atoms == 0
