"""The token contrastive loss, compared with a slow float64 oracle, and its sampler."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from mlsm_plugin.core.losses.token_contrastive import contrastive_terms, sample_pairs

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


@pytest.mark.slow
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

    names = ("loss", "correct", "positive_cosine", "negative_cosine")
    sums = {name: flat.sum() * 0.0 for name in names}
    for index in np.ndindex(*anchors.shape):
        if not anchors[index] or int(positive[index]) < 0 or int(negative[index][0]) < 0:
            continue
        anchor = unit(flat[index[0] * anchors.shape[1] + index[1]])
        keys = [unit(flat[int(i)]).detach() for i in (positive[index], *negative[index])]
        cosines = torch.stack([(anchor * key).sum() for key in keys])
        sums["loss"] = sums["loss"] - torch.log_softmax(cosines / temperature, dim=0)[0]
        sums["correct"] = sums["correct"] + float(cosines[0] > cosines[1:].max())
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


@settings(max_examples=40, deadline=None)
@given(problems())
def test_loss_gradient_and_statistics_are_those_of_the_plain_formula(problem: dict[str, Any]) -> None:
    expected, expected_gradient = loss_and_gradient(slow, problem, torch.float64)
    exact, gradient = loss_and_gradient(ours, problem, torch.float64)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(exact, name).double().sum(), value.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(exact.losses.sum(), exact.loss)
    torch.testing.assert_close(gradient, torch.nan_to_num(expected_gradient), rtol=1e-8, atol=1e-8)
    single, gradient = loss_and_gradient(ours, problem, torch.float32)
    assert single.loss.dtype == torch.float32
    assert float(single.loss.detach()) == pytest.approx(float(expected["loss"].detach()), rel=2e-4, abs=2e-4)
    scale = 1e-3 * max(1.0, float(expected_gradient.nan_to_num().abs().max()))
    torch.testing.assert_close(gradient.double(), expected_gradient.nan_to_num(), rtol=1e-3, atol=scale)
    assert bool((gradient[~problem["anchors"]] == 0).all())


def test_neighbours_that_agree_and_sequences_that_do_not_give_the_least_loss() -> None:
    semantics = torch.eye(3).repeat_interleave(4, dim=0).reshape(3, 4, 3)
    valid = torch.ones(3, 4, dtype=torch.bool)
    positive, negative = sample_pairs(valid, window=5, num_negatives=50, generator=generator())
    terms = contrastive_terms(semantics, valid, positive, negative, temperature=0.07)
    assert int(terms.correct.sum()) == 12
    assert float(terms.positive_cosine.sum()) == pytest.approx(12)
    assert float(terms.negative_cosine.sum()) == 0
    assert float(terms.loss) == pytest.approx(12 * math.log1p(50 * math.exp(-1 / 0.07)), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, scale: float) -> None:
    semantics = (torch.randn(3, 6, 8, generator=generator()) * scale).to(dtype)
    valid = torch.ones(3, 6, dtype=torch.bool)
    positive, negative = sample_pairs(valid, window=3, num_negatives=5, generator=generator())
    expected = oracle(semantics, valid, positive, negative, 0.07)["loss"]
    semantics.requires_grad_()
    loss = contrastive_terms(semantics, valid, positive, negative, temperature=0.07).loss
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
        loss = contrastive_terms(semantics, valid, positive, negative, temperature=0.07).loss
        loss.backward()
        assert bool(loss.isfinite())
        assert bool(semantics.grad.isfinite().all())
        assert bool((semantics.grad == 0).all()) == (scale < 1e-8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss, contrastive_terms(semantics, valid, positive, negative, temperature=0.07).loss)


def test_no_tensor_of_all_keys_is_made() -> None:
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
        contrastive_terms(semantics, valid, positive, negative, temperature=0.07).loss.backward()
    assert max(sizes) < 4 * 64 * 51 * 32 / 10


def test_shapes_that_do_not_belong_together_are_named() -> None:
    valid = torch.ones(2, 3, dtype=torch.bool)
    positive, negative = sample_pairs(valid, window=5, num_negatives=4, generator=generator())
    with pytest.raises(ValueError, match=r"expected semantics \(B, T, d\).*got \(2, 4, 5\), \(2, 3\)"):
        contrastive_terms(torch.zeros(2, 4, 5), valid, positive, negative, temperature=1.0)


# ---- the criterion ---------------------------------------------------------------------------------------
