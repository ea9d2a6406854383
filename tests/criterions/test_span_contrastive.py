"""The span contrastive loss against a slow float64 oracle, and the fairseq criterion around it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mlsm_plugin.criterions import span_contrastive
from mlsm_plugin.criterions.span_contrastive import (
    SpanContrastiveCriterion,
    occurrences,
    span_contrastive_loss,
    span_contrastive_terms,
)
from tests.tiny_run import INFERENCE_COPY, in_torch_ddp, seeded_model, training_config

NO_DROPOUT = ("--dropout", 0, "--attention-dropout", 0)


def oracle(
    queries: Any, keys: Any, positives: Any, candidates: Any, similarity: str, temperature: float | None
) -> tuple[torch.Tensor, list[bool], list[bool]]:
    """One query after the other, differentiated by autograd."""
    tau = math.sqrt(queries.size(1)) if temperature is None else temperature
    total = queries.sum() * 0.0 + keys.sum() * 0.0
    found, counted = [], []
    for query, positive, candidate in zip(queries, positives, candidates, strict=True):
        scores = (keys @ query if similarity == "inner" else -(keys - query).square().sum(dim=1)) / tau
        positive = positive & candidate
        counted.append(bool(positive.any()))
        best = scores.masked_fill(~candidate, -math.inf).argmax() if len(keys) else 0
        found.append(counted[-1] and bool(positive[best]))
        if counted[-1]:
            total = total + scores[candidate].logsumexp(dim=0) - scores[positive].logsumexp(dim=0)
    return total, found, counted


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    n, m, d = draw(st.integers(0, 6)), draw(st.integers(0, 9)), draw(st.integers(1, 5))
    source = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scale = draw(st.sampled_from([0.1, 1.0, 8.0]))
    return {
        "queries": torch.randn(n, d, generator=source, dtype=torch.float64) * scale,
        "keys": torch.randn(m, d, generator=source, dtype=torch.float64) * scale,
        "positives": torch.rand(n, m, generator=source) < draw(st.sampled_from([0.0, 0.3, 1.0])),
        "candidates": torch.rand(n, m, generator=source) < draw(st.sampled_from([0.0, 0.7, 1.0])),
        "similarity": draw(st.sampled_from(["inner", "l2"])),
        "temperature": draw(st.sampled_from([None, 0.3, 5.0])),
    }


@pytest.mark.parametrize("chunk_entries", [1, 1 << 22])
def test_loss_and_gradients_are_those_of_the_plain_formula(chunk_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_contrastive, "CHUNK_ENTRIES", chunk_entries)

    @settings(max_examples=80, deadline=None)
    @given(problems())
    def check(problem: dict[str, Any]) -> None:
        leaves = [problem[name].clone().requires_grad_() for name in ("queries", "keys")]
        rest = [problem[name] for name in ("positives", "candidates", "similarity", "temperature")]
        expected, found, counted = oracle(*leaves, *rest)
        expected_gradients = torch.autograd.grad(expected * 2.0, leaves)
        how = {"similarity": rest[2], "temperature": rest[3]}
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
            own = [leaf.detach().to(dtype, copy=True).requires_grad_() for leaf in leaves]
            terms = span_contrastive_terms(*own, *rest[:2], **how)
            (terms.loss * 2.0).backward()
            assert terms.loss.dtype == dtype
            assert float(terms.loss.detach()) == pytest.approx(float(expected.detach()), rel=tolerance, abs=tolerance)
            for leaf, gradient in zip(own, expected_gradients, strict=True):
                torch.testing.assert_close(leaf.grad.double(), gradient, rtol=tolerance, atol=20 * tolerance)
            assert terms.counted.tolist() == counted
        assert span_contrastive_terms(*leaves, *rest[:2], **how).found.tolist() == found

    check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    queries, keys = (torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).to(dtype) * 30 for n in (4, 9))
    positives, candidates = torch.zeros(4, 9, dtype=torch.bool), torch.ones(4, 9, dtype=torch.bool)
    positives[:, :2] = True
    expected, _, _ = oracle(queries.double(), keys.double(), positives, candidates, "inner", None)
    leaves = [queries.clone().requires_grad_(), keys.clone().requires_grad_()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = span_contrastive_loss(*leaves, positives, candidates)
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)
    assert all(leaf.grad.dtype == dtype and bool(leaf.grad.isfinite().all()) for leaf in leaves)


def test_no_matrix_of_all_scores_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_contrastive, "CHUNK_ENTRIES", 1 << 12)
    sizes: list[int] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for value in torch.utils._pytree.tree_leaves(result):
                if torch.is_tensor(value) and value.is_floating_point():
                    sizes.append(value.numel())
            return result

    queries, keys = torch.randn(200, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    positives = torch.rand(200, 1000) < 0.01
    with Recorder():
        span_contrastive_loss(queries, keys, positives, torch.ones_like(positives)).backward()
    assert max(sizes) < 200 * 1000 / 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(3, 5)}, r"expected queries \(n, d\) and keys \(m, d\), got \(2, 4\) and \(3, 5\)"),
        ({"positives": torch.zeros(2, 2, dtype=torch.bool)}, r"expected positives and candidates \(2, 3\)"),
        ({"similarity": "cosine"}, "similarity must be one of inner, l2, got cosine"),
        ({"temperature": 0.0}, r"the temperature must be positive, got 0\.0"),
    ],
)
def test_arguments_that_do_not_belong_together_are_named(change: dict[str, Any], message: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    arguments = {"queries": torch.zeros(2, 4), "keys": torch.zeros(3, 4), "positives": mask, "candidates": mask}
    with pytest.raises(ValueError, match=message):
        span_contrastive_loss(**{**arguments, **change})


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 9), st.integers(0, 4))
def test_occurrences_are_those_of_a_slow_search(seed: int, sequences: int, width: int, number: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(-1, 3, size=(sequences, width)))
    lengths = torch.from_numpy(rng.integers(1, 5, size=number))
    ngrams = torch.from_numpy(rng.integers(0, 3, size=(number, 4)))
    begins, ends = occurrences(tokens, ngrams, lengths)
    assert begins.shape == ends.shape == (number, sequences, width)
    for row, length in enumerate(lengths.tolist()):
        wanted = ngrams[row, :length].tolist()
        places = [
            (s, t) for s in range(sequences) for t in range(width) if tokens[s, t : t + length].tolist() == wanted
        ]
        assert [tuple(place) for place in begins[row].nonzero().tolist()] == places
        assert [tuple(place) for place in ends[row].nonzero().tolist()] == [(s, t + length - 1) for s, t in places]


# ---- the criterion ---------------------------------------------------------------------------------------


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
    sample = {**sample, "spans": {name: values[::9] for name, values in sample["spans"].items()}}
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
        if parameter.requires_grad and not INFERENCE_COPY.search(name):
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
    assert (sample_size > 0) == (edit is dict) == (float(log["loss"]) > 0)


def test_metrics_are_means_over_the_spans_of_all_workers() -> None:
    bit = math.log(2)
    logs = [
        {"loss": 30 * bit, "start_loss": 20 * bit, "end_loss": 10 * bit, "sample_size": 4, "num_spans": 5,
         "num_masked": 9, "num_content": 50, "num_groups": 2, "num_groups_without_spans": 1, "num_starts_found": 2,
         "num_ends_found": 1, "num_found": 1},
        {"loss": 10 * bit, "start_loss": 4 * bit, "end_loss": 6 * bit, "sample_size": 4, "num_spans": 5,
         "num_masked": 6, "num_content": 50, "num_groups": 2, "num_groups_without_spans": 0, "num_starts_found": 4,
         "num_ends_found": 3, "num_found": 3},
    ]  # fmt: skip

    def reduced(outputs: list[dict[str, Any]]) -> dict[str, Any]:
        with metrics.aggregate(new_root=True) as aggregator:
            SpanContrastiveCriterion.reduce_metrics(outputs)
        return dict(aggregator.get_smoothed_values())

    assert reduced(logs) == {
        "loss": 5.0, "start_loss": 3.0, "start_accuracy": 0.75, "end_loss": 2.0, "end_accuracy": 0.5, "accuracy": 0.5,
        "spans_per_group": 2.5, "span_length": 1.5, "masked_share": 0.15, "groups_without_spans": 0.25,
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
        ("--mask-prob", 0, r"mask_prob must be in \(0, 1\], got 0"),
        ("--span-length-p", 2, r"length_p must be in \(0, 1\], got 2"),
        ("--context-masking-ratio", 2, r"--context-masking-ratio must be in \[0, 1\], got 2"),
        ("--similarity-temperature", 0, "--similarity-temperature must be positive, got 0"),
    ],
)
def test_options_without_meaning_are_refused(pipeline: Any, flag: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup(pipeline, flag, value)


def test_criterion_of_another_task_is_refused(pipeline: Any) -> None:
    cfg = training_config(pipeline.data_bin, task="masked_lm", criterion="span_contrastive")
    with pytest.raises(ValueError, match="needs --task nonparametric_masked_lm"):
        tasks.setup_task(cfg.task).build_criterion(cfg.criterion)
