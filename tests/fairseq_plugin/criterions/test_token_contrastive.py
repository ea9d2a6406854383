"""The fairseq criterion of the token contrastive loss."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics

from mlsm_plugin.core.losses.token_contrastive import contrastive_terms, sample_pairs
from mlsm_plugin.fairseq_plugin.criterions.token_contrastive import TokenContrastiveCriterion
from tests.tiny_run import each_batch, seeded_model, training_config

NO_DROPOUT = ("--dropout", 0, "--attention-dropout", 0)


def setup(pipeline: Any, *flags: object, arch: str = "taco_small") -> tuple[Any, Any, Any, Any]:
    cfg = training_config(pipeline.data_bin, *NO_DROPOUT, *flags, task="taco", criterion="token_contrastive", arch=arch)
    task = tasks.setup_task(cfg.task)
    return cfg, task, seeded_model(cfg, task), task.build_criterion(cfg.criterion)


def parts_of(criterion: Any, model: Any, sample: Any) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Summed cross entropy and contrastive loss, masked tokens and anchors, through other calls of the model."""
    masked = sample["target"].ne(1)
    features, extra = model(**sample["net_input"], features_only=True, return_all_hiddens=True)
    logits = model.encoder.lm_head(features)[masked]
    mlm = torch.nn.functional.cross_entropy(logits, sample["target"][masked], reduction="sum")
    semantics = features - extra["inner_states"][0].transpose(0, 1)
    original = torch.where(masked, sample["target"], sample["net_input"]["src_tokens"])
    valid = ~torch.isin(original, torch.tensor([0, 1, 2, 3]))
    which = str(criterion.cfg.contrastive_anchors)
    anchors = {"all": valid, "masked": valid & masked, "unmasked": valid & ~masked}[which]
    drawn = criterion._generator(sample, semantics.device)
    positive, negative = sample_pairs(valid, window=5, num_negatives=criterion.cfg.negatives, generator=drawn)
    loss = contrastive_terms(semantics, anchors, positive, negative, temperature=0.07).loss
    count = int((anchors & (positive >= 0) & (negative[:, :, 0] >= 0)).sum())
    return mlm, loss, int(masked.sum()), count


@pytest.mark.parametrize("arch", ["taco_small", "mlsm_roberta_tiny", "roberta_prenorm"])
def test_loss_is_the_weighted_sum_of_its_parts(pipeline: Any, arch: str) -> None:
    cfg, task, model, criterion = setup(pipeline, "--contrastive-weight", 0.7, arch=arch)
    sample = next(each_batch(cfg, "valid", task=task))
    model.train()
    criterion.train()
    loss, sample_size, log = criterion(model, sample)
    mlm, contrastive, num_masked, num_anchors = parts_of(criterion, model, sample)
    assert (int(sample_size), int(log["num_anchors"])) == (num_masked, num_anchors)
    assert float(log["mlm_loss"]) == pytest.approx(float(mlm.detach()), rel=1e-5)
    assert float(log["contrastive_loss"]) == pytest.approx(float(contrastive.detach()), rel=1e-5)
    expected = mlm + 0.7 * num_masked / num_anchors * contrastive
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize(
    "anchors", ["all", *(pytest.param(one, marks=pytest.mark.slow) for one in ("masked", "unmasked"))]
)
def test_accumulated_batches_give_the_means_over_all_their_tokens(pipeline: Any, anchors: str) -> None:
    cfg, task, model, criterion = setup(pipeline, "--contrastive-anchors", anchors, "--contrastive-weight", 2)
    fitting = (one for one in each_batch(cfg, task=task) if one["target"].size(1) <= 64)
    samples = [*itertools.islice(fitting, 3), next(each_batch(cfg, "valid", task=task))]
    model.train()
    criterion.train()

    criterion.begin_update([*samples, {}], 7, device=torch.device("cpu"))
    total = 0
    for sample in samples:
        loss, sample_size, _ = criterion(model, sample)
        loss.backward()
        total += int(sample_size)
    found = {name: value.grad / total for name, value in model.named_parameters() if value.grad is not None}

    model.zero_grad()
    parts = [parts_of(criterion, model, sample) for sample in samples]
    mlm, contrastive, num_masked, num_anchors = (sum(column) for column in zip(*parts, strict=True))
    assert num_masked == total
    (mlm / num_masked + 2 * contrastive / num_anchors).backward()
    for name, value in model.named_parameters():
        if value.grad is not None:
            torch.testing.assert_close(found[name], value.grad, rtol=1e-3, atol=2e-5)
    assert len(found) > 10


def nothing_masked(sample: Any) -> Any:
    return {**sample, "target": torch.ones_like(sample["target"])}


def all_masked(sample: Any) -> Any:
    tokens = torch.where(sample["target"] != 1, sample["target"], sample["net_input"]["src_tokens"])
    return {**sample, "target": tokens}


def all_padding(sample: Any) -> Any:
    tokens = torch.ones_like(sample["target"])
    return {**sample, "target": tokens, "net_input": {**sample["net_input"], "src_tokens": tokens}}


def one_token_each(sample: Any) -> Any:
    tokens = torch.tensor([[0, 5, 2], [0, 6, 2]])
    return {**sample, "target": torch.ones_like(tokens), "net_input": {"src_tokens": tokens, "src_lengths": None}}


def one_sequence(sample: Any) -> Any:
    tokens = {"src_tokens": sample["net_input"]["src_tokens"][:1], "src_lengths": None}
    return {**sample, "id": sample["id"][:1], "target": sample["target"][:1], "net_input": tokens}


def dummy(sample: Any) -> Any:
    return {**sample, "is_dummy": True}


@pytest.mark.parametrize("across", [(), pytest.param(("--negatives-across-ranks",), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "edit",
    [nothing_masked, all_masked, all_padding, one_token_each, one_sequence, dummy],
    ids=lambda edit: edit.__name__,
)
def test_every_batch_gives_a_finite_loss_and_gradient(
    pipeline: Any, edit: Any, across: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    cfg, task, model, criterion = setup(pipeline, *across)
    sample = edit(next(each_batch(cfg, "valid", task=task)))
    model.train()
    criterion.train()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            criterion.begin_update([sample], 0, device=torch.device("cpu"))
            loss, _, log = criterion(model, sample)
    loss.backward()
    assert bool(loss.isfinite())
    gradients = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    missing = [name for name, value in gradients.items() if value is None]
    assert missing == []
    assert all(bool(value.isfinite().all()) for value in gradients.values() if value is not None)
    if edit in (nothing_masked, all_masked):
        assert float(log["contrastive_loss"]) > 0
    else:
        assert (float(log["contrastive_loss"]), int(log["num_anchors"])) == (0, 0)
    warnings = [record for record in caplog.records if "only one sequence with text" in record.getMessage()]
    assert len(warnings) == (1 if edit is one_sequence else 0)


def test_masked_special_symbols_are_no_anchors(pipeline: Any) -> None:
    cfg, task, _, criterion = setup(pipeline)
    sample = next(each_batch(cfg, "valid", task=task))
    tokens = sample["net_input"]["src_tokens"].clone()
    target = torch.ones_like(tokens)
    special = (tokens == 0) | (tokens == 2)
    target[special] = tokens[special]
    tokens[special] = task.mask_idx
    valid, masked = criterion._valid_and_masked({**sample, "target": target, "net_input": {"src_tokens": tokens}})
    assert int(special.sum()) > 8
    assert torch.equal(masked, special)
    assert not bool((valid & special).any())


def test_without_weight_it_is_masked_lm_bit_for_bit(pipeline: Any) -> None:
    cfg, task, model, criterion = setup(pipeline, "--contrastive-weight", 0, "--dropout", 0.2)
    stock_cfg = training_config(pipeline.data_bin, task="masked_lm", criterion="masked_lm", arch="taco_small")
    stock = tasks.setup_task(stock_cfg.task).build_criterion(stock_cfg.criterion)
    sample = next(each_batch(cfg, "valid", task=task))
    results = []
    for one in (criterion, stock):
        model.train()
        one.train()
        model.zero_grad()
        torch.manual_seed(3)
        loss, sample_size, log = one(model, sample)
        loss.backward()
        results.append(
            (loss, sample_size, [value.grad.clone() for value in model.parameters() if value.grad is not None])
        )
        if one is criterion:
            assert float(log["contrastive_loss"]) > 0
    assert torch.equal(results[0][0], results[1][0])
    assert int(results[0][1]) == int(results[1][1])
    assert all(torch.equal(one, other) for one, other in zip(results[0][2], results[1][2], strict=True))


def test_pairs_depend_on_seed_update_and_batch_only(pipeline: Any) -> None:
    cfg, task, model, criterion = setup(pipeline)
    first, second = itertools.islice(each_batch(cfg, "valid", task=task), 2)

    def contrastive(sample: Any, update: int, one: Any = criterion) -> float:
        one.begin_update([sample], update, device=torch.device("cpu"))
        return float(one(model, sample)[2]["contrastive_loss"])

    model.train()
    criterion.train()
    expected = contrastive(first, 4)
    contrastive(second, 5)
    assert contrastive(first, 4) == expected
    assert contrastive(first, 5) != expected
    _, _, _, other_seed = setup(pipeline, "--seed", 2)
    assert contrastive(first, 4, other_seed.train()) != expected
    model.eval()
    criterion.eval()
    assert contrastive(first, 4) == contrastive(first, 9)


def reduced(logs: list[dict[str, Any]]) -> dict[str, Any]:
    with metrics.aggregate(new_root=True) as aggregator:
        TokenContrastiveCriterion.reduce_metrics(logs)
    return dict(aggregator.get_smoothed_values())


def test_metrics_are_means_over_the_tokens_of_all_workers() -> None:
    bit = math.log(2)
    logs = [
        {
            "sample_size": 10, "num_anchors": 40, "mlm_loss": 50 * bit, "contrastive_loss": 80 * bit,
            "weighted_contrastive_loss": 160 * bit, "num_correct": 20, "positive_cosine": 30, "negative_cosine": 4,
            "num_possible_anchors": 50,
        },
        {
            "sample_size": 30, "num_anchors": 10, "mlm_loss": 70 * bit, "contrastive_loss": 20 * bit,
            "weighted_contrastive_loss": 40 * bit, "num_correct": 5, "positive_cosine": 5, "negative_cosine": 1,
            "num_possible_anchors": 50,
        },
    ]  # fmt: skip
    assert reduced(logs) == {
        "mlm_loss": 3.0, "contrastive_loss": 2.0, "contrastive_accuracy": 0.5, "alignment": 0.7,
        "negative_cosine": 0.1, "loss": 7.0, "mlm_ppl": 8.0, "contrasted": 0.5,
    }  # fmt: skip
    assert set(reduced([{}]).values()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--contrastive-weight", -1, "contrastive_weight must not be negative, got -1.0"),
        ("--positive-window", 1, "positive_window must be at least 2, got 1"),
        ("--negatives", 0, "negatives must be at least 1, got 0"),
        ("--temperature", 0, "temperature must be positive, got 0.0"),
    ],
)
def test_options_without_meaning_are_refused(pipeline: Any, flag: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup(pipeline, flag, value)


def test_criterion_of_another_task_is_refused(pipeline: Any) -> None:
    cfg = training_config(pipeline.data_bin, task="masked_lm", criterion="token_contrastive")
    with pytest.raises(ValueError, match="token_contrastive needs --task taco"):
        tasks.setup_task(cfg.task).build_criterion(cfg.criterion)
