"""The span contrastive loss, compared with a slow float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mlsm_plugin.core.losses import span_contrastive
from mlsm_plugin.core.losses.span_contrastive import occurrences, span_contrastive_terms

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
            assert terms.has_positive.tolist() == counted
        terms = span_contrastive_terms(*leaves, *rest[:2], **how)
        assert terms.correct.tolist() == found
        torch.testing.assert_close(terms.losses.sum(), terms.loss.detach())

    check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    queries, keys = (torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).to(dtype) * 30 for n in (4, 9))
    positives, candidates = torch.zeros(4, 9, dtype=torch.bool), torch.ones(4, 9, dtype=torch.bool)
    positives[:, :2] = True
    expected, _, _ = oracle(queries.double(), keys.double(), positives, candidates, "inner", None)
    leaves = [queries.clone().requires_grad_(), keys.clone().requires_grad_()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = span_contrastive_terms(*leaves, positives, candidates).loss
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
        span_contrastive_terms(queries, keys, positives, torch.ones_like(positives)).loss.backward()
    assert max(sizes) < 200 * 1000 / 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(3, 5)}, r"expected queries \(n, d\) and keys \(m, d\), got \(2, 4\) and \(3, 5\)"),
        ({"positives": torch.zeros(2, 2, dtype=torch.bool)}, r"expected positives and candidates \(2, 3\)"),
        ({"similarity": "cosine"}, "similarity must be one of inner, l2, got cosine"),
        ({"temperature": 0.0}, r"temperature must be positive, got 0\.0"),
    ],
)
def test_arguments_that_do_not_belong_together_are_named(change: dict[str, Any], message: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    arguments = {"queries": torch.zeros(2, 4), "keys": torch.zeros(3, 4), "positives": mask, "candidates": mask}
    with pytest.raises(ValueError, match=message):
        span_contrastive_terms(**{**arguments, **change})


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
