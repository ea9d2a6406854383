"""The fairseq criterion of the span contrastive loss, compared with slow sums."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics

from mlsm_plugin.fairseq_plugin.criterions.span_contrastive import SpanContrastiveCriterion
from tests.tiny_run import in_torch_ddp, seeded_model, training_config

NO_DROPOUT = ("--dropout", 0, "--attention-dropout", 0)


def setup(pipeline: Any, *flags: object, arch: str = "mlsm_roberta_tiny") -> tuple[Any, Any, Any, Any]:
    """Task, model, criterion, and a batch of two groups."""
    words = ("--group-size", 4, "--max-positions", 64, "--tokens-per-sample", 48, *NO_DROPOUT)
    cfg = training_config(
        *(pipeline.data_bin, *words, *flags), task="nonparametric_masked_lm", criterion="span_contrastive", arch=arch
    )
    task = tasks.setup_task(cfg.task)
    model = seeded_model(cfg, task)
    task.load_dataset("train")
    dataset = task.dataset("train")
    return task, model, task.build_criterion(cfg.criterion), dataset.collater([dataset[0], dataset[1]])


def slow_losses(task: Any, model: Any, sample: Any, *, similarity: str, tau: float, single: bool) -> dict[str, float]:
    """Positives found token by token, losses query by query."""
    masked, context = sample["net_input"]["src_tokens"], sample["context"]["src_tokens"]
    features = model(masked, features_only=True)[0].double()
    tokens = masked if sample["mask_context"] else context
    keys = features if sample["mask_context"] else model(context, features_only=True)[0].double()
    no_key = {0, 1, 2, task.mask_idx, *task.span_masks}
    losses = {"start": 0.0, "end": 0.0, "counted": 0}
    spans = sample["spans"]
    for number in range(len(spans["length"])):
        row, start, length = (int(spans[name][number]) for name in ("sequence", "start", "length"))
        ngram = context[row, start : start + length].tolist()
        for end, place in (("start", "query_start"), ("end", "query_end")):
            query = features[row, int(spans[place][number])]
            scores, positive = [], []
            for other in range(len(tokens)):
                for t in range(tokens.size(1)):
                    if other == row or int(tokens[other, t]) in no_key:
                        continue
                    difference = (keys[other, t] - query).square().sum()
                    score = (keys[other, t] * query).sum() if similarity == "inner" else -difference
                    scores.append(float(score.detach()) / tau)
                    first = t if end == "start" else t - length + 1
                    positive.append(first >= 0 and tokens[other, first : first + length].tolist() == ngram)
            array, flags = np.array(scores), np.array(positive)
            if flags.any():
                losses[end] += np.logaddexp.reduce(array) - np.logaddexp.reduce(array[flags])
                losses["counted"] += end == "start"
    if single:
        losses["end"] = 0.0
    return losses


@pytest.mark.parametrize(
    ("flags", "similarity"),
    [
        ((), "inner"),
        (("--similarity", "l2", "--similarity-temperature", 3), "l2"),
        (("--span-mode", "single"), "inner"),
        (("--span-mask-symbols", "shared"), "inner"),
        (("--context-masking-ratio", 1), "inner"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) and value else str(value),
)
def test_loss_is_that_of_a_slow_search(pipeline: Any, flags: tuple[object, ...], similarity: str) -> None:
    task, model, criterion, sample = setup(pipeline, *flags)
    sample = {**sample, "spans": {name: values[::6] for name, values in sample["spans"].items()}}
    model.eval()
    with torch.no_grad():
        loss, sample_size, log = criterion(model, sample)
        tau = 3.0 if similarity == "l2" else math.sqrt(32)
        single = "single" in flags
        expected = slow_losses(task, model, sample, similarity=similarity, tau=tau, single=single)
    assert len(sample["spans"]["length"]) > 3
    assert int(sample_size) == expected["counted"] > 0
    assert float(log["start_loss"]) == pytest.approx(expected["start"], rel=1e-3)
    assert float(loss) == pytest.approx(expected["start"] + expected["end"], rel=1e-3)
    assert ("end_loss" in log) == (not single)


def without_spans(sample: Any) -> Any:
    return {**sample, "spans": {name: values[:0] for name, values in sample["spans"].items()}}


def dummy(sample: Any) -> Any:
    return {**sample, "is_dummy": True}


def one_sequence(sample: Any) -> Any:
    kept = sample["spans"]["sequence"] == 0
    return {
        **sample,
        "net_input": {"src_tokens": sample["net_input"]["src_tokens"][:1]},
        "context": {"src_tokens": sample["context"]["src_tokens"][:1]},
        "spans": {name: values[kept] for name, values in sample["spans"].items()},
    }


@pytest.mark.slow
@pytest.mark.parametrize("edit", [dict, without_spans, dummy, one_sequence], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("flags", [(), ("--context-masking-ratio", 1), ("--negatives-across-ranks",)])
def test_every_parameter_gets_a_finite_gradient_as_torch_ddp_demands(
    pipeline: Any, edit: Any, flags: tuple[object, ...], tmp_path: Path
) -> None:
    _, model, criterion, sample = setup(pipeline, *flags)
    sample = edit(sample)

    def train(wrapped: Any) -> tuple[float, int, dict[str, Any]]:
        wrapped.encoder = model.encoder  # as fairseq's wrapper passes on what it does not have
        for _ in range(2):
            loss, sample_size, log = criterion(wrapped, sample)
            loss.backward()
        return float(loss), int(sample_size), log

    loss, sample_size, log = in_torch_ddp(model.train(), tmp_path, train)
    assert math.isfinite(loss)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
    assert (sample_size > 0) == (edit is dict) == (float(log["loss"]) > 0)


def test_metrics_are_means_over_the_spans_of_all_workers() -> None:
    bit = math.log(2)
    logs = [
        {"loss": 30 * bit, "start_loss": 20 * bit, "end_loss": 10 * bit, "sample_size": 4, "num_spans": 5,
         "num_masked": 9, "num_groups": 2, "num_groups_without_spans": 1, "num_starts_found": 2,
         "num_ends_found": 1, "num_found": 1},
        {"loss": 10 * bit, "start_loss": 4 * bit, "end_loss": 6 * bit, "sample_size": 4, "num_spans": 5,
         "num_masked": 6, "num_groups": 2, "num_groups_without_spans": 0, "num_starts_found": 4,
         "num_ends_found": 3, "num_found": 3},
    ]  # fmt: skip

    def reduced(outputs: list[dict[str, Any]]) -> dict[str, Any]:
        with metrics.aggregate(new_root=True) as aggregator:
            SpanContrastiveCriterion.reduce_metrics(outputs)
        return dict(aggregator.get_smoothed_values())

    assert reduced(logs) == {
        "loss": 5.0, "start_loss": 3.0, "start_accuracy": 0.75, "end_loss": 2.0, "end_accuracy": 0.5, "accuracy": 0.5,
        "spans_per_group": 2.5, "span_length": 1.5, "groups_without_spans": 0.25, "with_positive": 0.8,
    }  # fmt: skip
    assert set(reduced([{}]).values()) == {0.0}


def test_checkpoint_without_the_masks_of_spans_loads_and_they_begin_as_its_mask(pipeline: Any) -> None:
    task, model, _, _ = setup(pipeline)
    state = torch.load(pipeline.auxiliary)["model"]
    model.load_state_dict(state, strict=True)
    rows = model.encoder.sentence_encoder.embed_tokens.weight
    assert len(rows) == len(state["encoder.lm_head.bias"]) + 2
    assert all(torch.equal(rows[mask], rows[task.mask_idx]) for mask in task.span_masks)
    assert torch.equal(rows[:-2], state["encoder.sentence_encoder.embed_tokens.weight"])
    shared, _, _, _ = setup(pipeline, "--span-mask-symbols", "shared")
    assert len(shared.source_dictionary) == len(rows) - 2
    assert shared.span_masks == [shared.mask_idx, shared.mask_idx]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--group-size", 1, "--group-size must be at least 2, got 1"),
        ("--mask-prob", 0, "mask_prob must be above 0 and at most 1, got 0"),
        ("--span-length-p", 2, "length_p must be above 0 and at most 1, got 2"),
        ("--context-masking-ratio", 2, r"--context-masking-ratio must be in \[0, 1\], got 2"),
        ("--similarity-temperature", 0, "similarity temperature must be positive, got 0"),
        ("--negative-group-size", 2, "--negative-group-size needs --negatives-across-ranks"),
    ],
)
def test_options_without_meaning_are_refused(pipeline: Any, flag: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup(pipeline, flag, value)


def test_criterion_of_another_task_is_refused(pipeline: Any) -> None:
    cfg = training_config(pipeline.data_bin, task="masked_lm", criterion="span_contrastive")
    with pytest.raises(ValueError, match="needs --task nonparametric_masked_lm"):
        tasks.setup_task(cfg.task).build_criterion(cfg.criterion)
