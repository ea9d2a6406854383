"""The task of TACO: its criterion is told the batches of an update before the first of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.data.iterators import GroupedIterator
from fairseq.models import BaseFairseqModel

from mlsm_plugin.fairseq_plugin.criterions.token_contrastive import TokenContrastiveCriterion
from mlsm_plugin.fairseq_plugin.tasks.taco import TacoTask
from tests.tiny_models import MASKED_LM, TinyData
from tests.tiny_run import seeded_model, training_config

TACO = {"task": "taco", "criterion": "token_contrastive", "arch": "roberta"}
SAMPLES = ("--tokens-per-sample", 24, "--max-positions", 24)


class NoStep:
    """An optimizer that only keeps the gradients."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


@pytest.fixture
def task(tiny: TinyData) -> TacoTask:
    found = tasks.setup_task(training_config(tiny.data_bin, *SAMPLES, **TACO).task)
    assert isinstance(found, TacoTask)
    return found


def updates(task: TacoTask, update_freq: int) -> GroupedIterator:
    task.load_dataset("train")
    iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=4, max_positions=64, seed=1)
    return GroupedIterator(iterator.next_epoch_itr(shuffle=True), update_freq)


@pytest.mark.parametrize("update_freq", [1, 3])
def test_criterion_is_told_of_an_update_before_its_first_batch(task: TacoTask, update_freq: int) -> None:
    class Noting:
        """A criterion that writes down what it is told."""

        def __init__(self) -> None:
            self.calls: list[tuple[str, Any]] = []

        def begin_update(self, batches: list[Any], update_num: int, *, device: torch.device) -> None:
            assert device == torch.device("cpu")
            self.calls.append(("update", (update_num, [batch["id"].tolist() for batch in batches])))

        def __call__(self, model: Any, sample: dict[str, Any]) -> Any:
            self.calls.append(("batch", (sample["id"].tolist(), bool(sample.get("is_dummy")))))
            return 2 * torch.ones((), requires_grad=True), 1, {}

    criterion, model, expected = Noting(), BaseFairseqModel(), []
    for number, update in enumerate(updates(task, update_freq)):
        if number == 2:
            break
        ids = [batch["id"].tolist() for batch in update]
        expected.append(("update", (number, ids)))
        for place, batch in enumerate(update):
            ignored = update_freq == 3 and place == 2
            task.train_step(batch, model, criterion, NoStep(), number, ignored)
            expected.append(("batch", (ids[place], ignored)))
            assert "is_dummy" not in batch  # fairseq keeps it for later
    assert len(expected) == 2 * (1 + update_freq)
    assert criterion.calls == expected


def test_loss_of_several_batches_is_that_of_one(tiny: TinyData) -> None:
    """The anchors and masked tokens of all batches decide the weight of each, as the criterion is told in time."""
    cfg = training_config(tiny.data_bin, *SAMPLES, "--dropout", 0, "--attention-dropout", 0, **TACO)
    task = tasks.setup_task(cfg.task)
    model, criterion = seeded_model(cfg, task), task.build_criterion(cfg.criterion)
    assert isinstance(criterion, TokenContrastiveCriterion)
    update = next(updates(task, 2))
    scales = []
    for batch in update:
        task.train_step(batch, model.train(), criterion, NoStep(), 0)
        scales.append(criterion._anchor_scale)
    assert scales[0] == scales[1]
    task.train_step(update[0], model, criterion, NoStep(), 1)  # no new update was fetched
    assert criterion._anchor_scale == scales[0]


def test_criterion_of_masked_lm_is_not_told(task: TacoTask, tiny: TinyData) -> None:
    cfg = training_config(tiny.data_bin, *SAMPLES, **TACO)
    criterion = task.build_criterion(training_config(tiny.data_bin, **MASKED_LM).criterion)
    (first, *_) = next(updates(task, 2))
    loss, size, _ = task.train_step(first, seeded_model(cfg, task), criterion, NoStep(), 0)
    assert float(loss) > 0
    assert size > 0


def test_criterion_needs_the_task(tiny: TinyData) -> None:
    stock = tasks.setup_task(training_config(tiny.data_bin, **MASKED_LM).task)
    cfg = training_config(tiny.data_bin, **TACO)
    with pytest.raises(ValueError, match="--criterion token_contrastive needs --task taco"):
        stock.build_criterion(cfg.criterion)


@pytest.mark.parametrize(
    ("max_sentences", "flags", "refused"),
    [
        (1, (), True),
        (1, ("--negatives-across-ranks",), False),
        (1, ("--contrastive-weight", 0), False),
        (4, (), False),
        pytest.param(4, ("--tokens-per-sample", 2), True, marks=pytest.mark.slow),
    ],
)
def test_a_training_without_pairs_is_refused(
    tiny: TinyData, max_sentences: int, flags: tuple[object, ...], refused: bool
) -> None:
    cfg = training_config(tiny.data_bin, *SAMPLES, *flags, **TACO)
    task = tasks.setup_task(cfg.task)
    task.build_criterion(cfg.criterion)
    task.load_dataset("train")
    task.load_dataset("valid")
    how = {"max_sentences": max_sentences, "max_positions": 64, "seed": 1}
    task.get_batch_iterator(task.dataset("valid"), **how)  # which trains nothing
    if not refused:
        task.get_batch_iterator(task.dataset("train"), **how)
        return
    with pytest.raises(ValueError, match=r"^only 0 of the anchors of train have a positive and negatives; an anchor"):
        task.get_batch_iterator(task.dataset("train"), **how)
