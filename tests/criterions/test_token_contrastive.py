"""The token contrastive loss against a slow float64 oracle, its sampler, and the fairseq criterion around them."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from mlsm_plugin.criterions import token_contrastive
from mlsm_plugin.criterions.token_contrastive import (
    TokenContrastiveCriterion,
    contrastive_terms,
    sample_pairs,
    token_contrastive_loss,
)
from tests.tiny_run import INFERENCE_COPY, batches, seeded_model, training_config

NO_DROPOUT = ("--dropout", 0, "--attention-dropout", 0)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- the sampler -----------------------------------------------------------------------------------------


def allowed_positives(valid: np.ndarray, row: int, place: int, window: int) -> set[int]:
    others = [t for t in np.flatnonzero(valid[row]) if t != place]
    near = [t for t in others if abs(t - place) < window]
    return {row * valid.shape[1] + t for t in near or others}


def allowed_negatives(valid: np.ndarray, row: int) -> set[int]:
    width = valid.shape[1]
    return {i * width + t for i in range(len(valid)) if i != row for t in np.flatnonzero(valid[i])}


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 14))
    share = draw(st.sampled_from([0.0, 0.2, 0.6, 0.95, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return torch.from_numpy(rng.random(shape) < share)


@settings(max_examples=60, deadline=None)
@given(masks(), st.integers(2, 20), st.integers(1, 6), st.integers(0, 10**6))
def test_pairs_are_drawn_from_what_is_allowed(valid: torch.Tensor, window: int, num: int, seed: int) -> None:
    positive, negative = sample_pairs(valid, window=window, num_negatives=num, generator=generator(seed))
    assert positive.shape == valid.shape
    assert negative.shape == (*valid.shape, num)
    assert positive.dtype == negative.dtype == torch.int64
    array = valid.numpy()
    for row, place in np.ndindex(array.shape):
        found = int(positive[row, place])
        allowed = allowed_positives(array, row, place, window) if array[row, place] else set()
        assert found in allowed if allowed else found == -1
        others = allowed_negatives(array, row) if array[row, place] else set()
        drawn = set(negative[row, place].tolist())
        assert drawn <= others if others else drawn == {-1}


def uniform(drawn: list[int], allowed: set[int]) -> float:
    """p-value of a chi-square test that ``drawn`` is uniform over ``allowed``."""
    counts = Counter(drawn)
    assert set(counts) == allowed
    if len(allowed) == 1:
        return 1.0
    return float(stats.chisquare([counts[value] for value in sorted(allowed)]).pvalue)


def test_pairs_are_uniform_in_the_window_and_over_the_other_sequences() -> None:
    valid = torch.zeros(4, 12, dtype=torch.bool)
    valid[0, [0, 1, 2, 4, 5, 6, 7]] = True  # gaps
    valid[1, [0, 9, 11]] = True  # 0 has nothing near
    valid[2, 3] = True  # alone in its sequence
    valid[3] = True
    positives: dict[tuple[int, int], list[int]] = {}
    negatives: dict[tuple[int, int], list[int]] = {}
    source = generator(5)
    for _ in range(3000):
        positive, negative = sample_pairs(valid, window=3, num_negatives=2, generator=source)
        for place in ((0, 4), (0, 0), (1, 0), (1, 9), (3, 11)):
            positives.setdefault(place, []).append(int(positive[place]))
            negatives.setdefault(place, []).extend(negative[place].tolist())
        assert int(positive[2, 3]) == -1
    for (row, place), drawn in positives.items():
        assert uniform(drawn, allowed_positives(valid.numpy(), row, place, 3)) > 1e-3
        assert uniform(negatives[row, place], allowed_negatives(valid.numpy(), row)) > 1e-3
    assert set(positives[1, 0]) == {12 + 9, 12 + 11}


def test_the_same_seed_draws_the_same_pairs() -> None:
    valid = torch.rand(4, 30, generator=generator()) < 0.9
    draws = [sample_pairs(valid, window=5, num_negatives=7, generator=generator(seed)) for seed in (3, 3, 4)]
    assert all(torch.equal(one, other) for one, other in zip(draws[0], draws[1], strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(draws[0], draws[2], strict=True))


@pytest.mark.parametrize(
    ("valid", "window", "num", "message"),
    [
        (torch.ones(2, 3, dtype=torch.bool), 1, 5, "window >= 2 and num_negatives >= 1, got 1 and 5"),
        (torch.ones(2, 3, dtype=torch.bool), 5, 0, "got 5 and 0"),
        (torch.ones(2, 3), 5, 5, r"expected valid \(B, T\) bool, got \(2, 3\) torch.float32"),
        (torch.ones(3, dtype=torch.bool), 5, 5, r"got \(3,\)"),
    ],
)
def test_what_cannot_be_sampled_is_refused(valid: torch.Tensor, window: int, num: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_pairs(valid, window=window, num_negatives=num, generator=generator())


# ---- the loss --------------------------------------------------------------------------------------------


def oracle(semantics: Any, anchors: Any, positive: Any, negative: Any, temperature: float) -> dict[str, torch.Tensor]:
    """Loops in float64, differentiated by autograd."""
    flat = semantics.double().flatten(0, 1)

    def unit(vector: torch.Tensor) -> torch.Tensor:
        norm = vector.square().sum().sqrt()
        return vector / norm if float(norm) > 0 else vector * 0.0

    names = ("loss", "num_correct", "positive_cosine", "negative_cosine")
    sums = {name: flat.sum() * 0.0 for name in names}
    for index in np.ndindex(*anchors.shape):
        if not anchors[index] or int(positive[index]) < 0 or int(negative[index][0]) < 0:
            continue
        anchor = unit(flat[index[0] * anchors.shape[1] + index[1]])
        keys = [unit(flat[int(i)]).detach() for i in (positive[index], *negative[index])]
        cosines = torch.stack([(anchor * key).sum() for key in keys])
        sums["loss"] = sums["loss"] - torch.log_softmax(cosines / temperature, dim=0)[0]
        sums["num_correct"] = sums["num_correct"] + float(cosines[0] > cosines[1:].max())
        sums["positive_cosine"] = sums["positive_cosine"] + cosines[0]
        sums["negative_cosine"] = sums["negative_cosine"] + cosines[1:].mean()
    return sums


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    valid = draw(masks())
    seed, num = draw(st.integers(0, 10**6)), draw(st.integers(1, 5))
    positive, negative = sample_pairs(valid, window=3, num_negatives=num, generator=generator(seed))
    source = generator(seed + 1)
    dim = draw(st.integers(1, 6))
    semantics = torch.randn(*valid.shape, dim, generator=source, dtype=torch.float64) * draw(
        st.sampled_from([1e-3, 1.0, 1e3])
    )
    if draw(st.booleans()):
        semantics[torch.rand(valid.shape, generator=source) < 0.2] = 0.0
    anchors = valid & (torch.rand(valid.shape, generator=source) < draw(st.sampled_from([0.5, 1.0])))
    temperature = draw(st.sampled_from([0.02, 0.07, 1.0, 10.0]))
    return {
        "semantics": semantics, "anchors": anchors, "positive": positive, "negative": negative,
        "temperature": temperature,
    }  # fmt: skip


def loss_and_gradient(function: Any, problem: dict[str, Any], dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    semantics = problem["semantics"].to(dtype, copy=True).requires_grad_()
    result = function(semantics, *(problem[name] for name in ("anchors", "positive", "negative")), problem)
    loss = result["loss"] if isinstance(result, dict) else result.loss
    (loss * 3.0).backward()
    return result, semantics.grad / 3.0


def ours(semantics: Any, anchors: Any, positive: Any, negative: Any, problem: dict[str, Any]) -> Any:
    return contrastive_terms(semantics, anchors, positive, negative, temperature=problem["temperature"])


def slow(semantics: Any, anchors: Any, positive: Any, negative: Any, problem: dict[str, Any]) -> Any:
    return oracle(semantics, anchors, positive, negative, problem["temperature"])


@pytest.mark.parametrize("chunk_entries", [1, 1 << 20])
def test_loss_gradient_and_statistics_are_those_of_the_plain_formula(
    chunk_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_contrastive, "CHUNK_ENTRIES", chunk_entries)

    @settings(max_examples=40, deadline=None)
    @given(problems())
    def check(problem: dict[str, Any]) -> None:
        expected, expected_gradient = loss_and_gradient(slow, problem, torch.float64)
        exact, gradient = loss_and_gradient(ours, problem, torch.float64)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(exact, name), value.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradient, torch.nan_to_num(expected_gradient), rtol=1e-8, atol=1e-8)
        single, gradient = loss_and_gradient(ours, problem, torch.float32)
        assert single.loss.dtype == torch.float32
        assert float(single.loss.detach()) == pytest.approx(float(expected["loss"].detach()), rel=2e-4, abs=2e-4)
        scale = 1e-3 * max(1.0, float(expected_gradient.nan_to_num().abs().max()))
        torch.testing.assert_close(gradient.double(), expected_gradient.nan_to_num(), rtol=1e-3, atol=scale)
        assert bool((gradient[~problem["anchors"]] == 0).all())

    check()


def test_neighbours_that_agree_and_sequences_that_do_not_give_the_least_loss() -> None:
    semantics = torch.eye(3).repeat_interleave(4, dim=0).reshape(3, 4, 3)
    valid = torch.ones(3, 4, dtype=torch.bool)
    positive, negative = sample_pairs(valid, window=5, num_negatives=50, generator=generator())
    terms = contrastive_terms(semantics, valid, positive, negative, temperature=0.07)
    assert float(terms.num_correct) == 12
    assert float(terms.positive_cosine) == pytest.approx(12)
    assert float(terms.negative_cosine) == 0
    assert float(terms.loss) == pytest.approx(12 * math.log1p(50 * math.exp(-1 / 0.07)), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, scale: float) -> None:
    semantics = (torch.randn(3, 6, 8, generator=generator()) * scale).to(dtype)
    valid = torch.ones(3, 6, dtype=torch.bool)
    positive, negative = sample_pairs(valid, window=3, num_negatives=5, generator=generator())
    expected = oracle(semantics, valid, positive, negative, 0.07)["loss"]
    semantics.requires_grad_()
    loss = token_contrastive_loss(semantics, valid, positive, negative, temperature=0.07)
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    assert semantics.grad.dtype == dtype
    assert scale < 1 or bool(semantics.grad.isfinite().all())


def test_vectors_of_any_length_give_finite_gradients_and_autocast_rounds_nothing() -> None:
    valid = torch.ones(3, 6, dtype=torch.bool)
    positive, negative = sample_pairs(valid, window=3, num_negatives=5, generator=generator())
    for scale in (0.0, 1e-40, 1e-20, 1e-9, 1e-7, 1e15):
        semantics = (torch.randn(3, 6, 8, generator=generator()) * scale).requires_grad_()
        loss = token_contrastive_loss(semantics, valid, positive, negative, temperature=0.07)
        loss.backward()
        assert bool(loss.isfinite())
        assert bool(semantics.grad.isfinite().all())
        assert bool((semantics.grad == 0).all()) == (scale < 1e-8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss, token_contrastive_loss(semantics, valid, positive, negative, temperature=0.07))


def test_no_tensor_of_all_keys_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_contrastive, "CHUNK_ENTRIES", 1 << 12)
    sizes: list[int] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            sizes.extend(value.numel() for value in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(value))
            return result

    valid = torch.ones(4, 64, dtype=torch.bool)
    positive, negative = sample_pairs(valid, window=5, num_negatives=50, generator=generator())
    semantics = torch.randn(4, 64, 32, requires_grad=True)
    with Recorder():
        token_contrastive_loss(semantics, valid, positive, negative, temperature=0.07).backward()
    assert max(sizes) < 4 * 64 * 51 * 32 / 10


def test_shapes_that_do_not_belong_together_are_named() -> None:
    valid = torch.ones(2, 3, dtype=torch.bool)
    positive, negative = sample_pairs(valid, window=5, num_negatives=4, generator=generator())
    with pytest.raises(ValueError, match=r"expected semantics \(B, T, d\).*got \(2, 4, 5\), \(2, 3\)"):
        token_contrastive_loss(torch.zeros(2, 4, 5), valid, positive, negative, temperature=1.0)


# ---- the criterion ---------------------------------------------------------------------------------------


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
    valid = (original != 0) & (original != 1) & (original != 2)
    which = str(criterion.cfg.contrastive_anchors)
    anchors = {"all": valid, "masked": valid & masked, "unmasked": valid & ~masked}[which]
    drawn = criterion._generator(sample, semantics.device)
    positive, negative = sample_pairs(valid, window=5, num_negatives=criterion.cfg.negatives, generator=drawn)
    loss = token_contrastive_loss(semantics, anchors, positive, negative, temperature=0.07)
    count = int((anchors & (positive >= 0) & (negative[:, :, 0] >= 0)).sum())
    return mlm, loss, int(masked.sum()), count


@pytest.mark.parametrize("arch", ["taco_small", "mlsm_roberta_tiny", "roberta_prenorm"])
def test_loss_is_the_weighted_sum_of_its_parts(pipeline: Any, arch: str) -> None:
    cfg, task, model, criterion = setup(pipeline, "--contrastive-weight", 0.7, arch=arch)
    sample = batches(cfg, "valid", task=task)[0]
    model.train(), criterion.train()
    loss, sample_size, log = criterion(model, sample)
    mlm, contrastive, num_masked, num_anchors = parts_of(criterion, model, sample)
    assert (int(sample_size), int(log["num_anchors"])) == (num_masked, num_anchors)
    assert float(log["mlm_loss"]) == pytest.approx(float(mlm.detach()), rel=1e-5)
    assert float(log["contrastive_loss"]) == pytest.approx(float(contrastive.detach()), rel=1e-5)
    expected = mlm + 0.7 * num_masked / num_anchors * contrastive
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("anchors", ["all", "masked", "unmasked"])
def test_accumulated_batches_give_the_means_over_all_their_tokens(pipeline: Any, anchors: str) -> None:
    cfg, task, model, criterion = setup(pipeline, "--contrastive-anchors", anchors, "--contrastive-weight", 2)
    fitting = (one for one in batches(cfg, task=task) if one["target"].size(1) <= 64)
    samples = [*itertools.islice(fitting, 3), batches(cfg, "valid", task=task)[0]]
    model.train(), criterion.train()

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


@pytest.mark.parametrize("across", [(), ("--negatives-across-ranks",)])
@pytest.mark.parametrize(
    "edit",
    [nothing_masked, all_masked, all_padding, one_token_each, one_sequence, dummy],
    ids=lambda edit: edit.__name__,
)
def test_every_batch_gives_a_finite_loss_and_gradient(
    pipeline: Any, edit: Any, across: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    cfg, task, model, criterion = setup(pipeline, *across)
    sample = edit(batches(cfg, "valid", task=task)[0])
    model.train(), criterion.train()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            criterion.begin_update([sample], 0, device=torch.device("cpu"))
            loss, _, log = criterion(model, sample)
    loss.backward()
    assert bool(loss.isfinite())
    gradients = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    missing = [name for name, value in gradients.items() if value is None and not INFERENCE_COPY.search(name)]
    assert missing == []
    assert all(bool(value.isfinite().all()) for value in gradients.values() if value is not None)
    if edit in (nothing_masked, all_masked):
        assert float(log["contrastive_loss"]) > 0
    else:
        assert (float(log["contrastive_loss"]), int(log["num_anchors"])) == (0, 0)
    warnings = [record for record in caplog.records if "no other to draw negatives from" in record.getMessage()]
    assert len(warnings) == (1 if edit is one_sequence else 0)


def test_masked_special_symbols_are_no_anchors(pipeline: Any) -> None:
    cfg, task, _, criterion = setup(pipeline)
    sample = batches(cfg, "valid", task=task)[0]
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
    sample = batches(cfg, "valid", task=task)[0]
    results = []
    for one in (criterion, stock):
        model.train(), one.train(), model.zero_grad()
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
    first, second = batches(cfg, "valid", task=task)[:2]

    def contrastive(sample: Any, update: int, one: Any = criterion) -> float:
        one.begin_update([sample], update, device=torch.device("cpu"))
        return float(one(model, sample)[2]["contrastive_loss"])

    model.train(), criterion.train()
    expected = contrastive(first, 4)
    contrastive(second, 5)
    assert contrastive(first, 4) == expected
    assert contrastive(first, 5) != expected
    _, _, _, other_seed = setup(pipeline, "--seed", 2)
    assert contrastive(first, 4, other_seed.train()) != expected
    model.eval(), criterion.eval()
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
        },
        {
            "sample_size": 30, "num_anchors": 10, "mlm_loss": 70 * bit, "contrastive_loss": 20 * bit,
            "weighted_contrastive_loss": 40 * bit, "num_correct": 5, "positive_cosine": 5, "negative_cosine": 1,
        },
    ]  # fmt: skip
    assert reduced(logs) == {
        "mlm_loss": 3.0, "contrastive_loss": 2.0, "contrastive_accuracy": 0.5, "alignment": 0.7,
        "negative_cosine": 0.1, "loss": 7.0, "mlm_ppl": 8.0,
    }  # fmt: skip
    assert set(reduced([{}]).values()) == {0.0, 1.0}
