"""The figures of a coder: slow loops as the oracle, chunks that do not matter, and a mean that is far from zero."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.quality import ReconstructionQuality, coder_health
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SparseAutoencoder
from tests.core.sparse_coding.sae_weights import random_weights

ATOMS, DIM = 12, 5


def example(rows: int = 300, seed: int = 0) -> tuple[np.ndarray, sp.csr_matrix, np.ndarray]:
    """Hidden states, codes of which some atoms are rare and one is dead, and reconstructions."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, DIM)) + 3
    used = rng.random((rows, ATOMS)) < np.linspace(0, 0.55, ATOMS) ** 2
    codes = sp.csr_matrix(np.where(used, rng.exponential(size=(rows, ATOMS)), 0))
    return hidden, codes, 0.9 * hidden + rng.normal(scale=0.3, size=hidden.shape)


def figures_of(hidden: Any, codes: Any, found: Any, cuts: tuple[int, ...] = ()) -> dict[str, Any]:
    quality = ReconstructionQuality(ATOMS, DIM)
    borders = [0, *sorted(min(cut, len(hidden)) for cut in cuts), len(hidden)]
    for first, last in itertools.pairwise(borders):
        quality.add(hidden[first:last], codes[first:last], found[first:last])
    return quality.result()


def slow_figures(hidden: np.ndarray, codes: sp.csr_matrix, found: np.ndarray) -> dict[str, float]:
    """The definitions, one number at a time."""
    n, dense = len(hidden), codes.toarray()
    mean = [math.fsum(hidden[i][j] for i in range(n)) / n for j in range(DIM)]
    error = [math.fsum((hidden[i][j] - found[i][j]) ** 2 for j in range(DIM)) for i in range(n)]
    about_mean = math.fsum((hidden[i][j] - mean[j]) ** 2 for i in range(n) for j in range(DIM))
    norm = [math.sqrt(math.fsum(value**2 for value in row)) for row in hidden]
    norm_out = [math.sqrt(math.fsum(value**2 for value in row)) for row in found]
    product = [math.fsum(a * b for a, b in zip(hidden[i], found[i], strict=True)) for i in range(n)]
    uses = [sum(dense[i][k] != 0 for i in range(n)) for k in range(ATOMS)]
    over = {name: [use for use in uses if use / n > share] for name, share in (("1", 0.01), ("10", 0.1))}
    return {
        "tokens": n,
        "explained_variance": 1 - math.fsum(error) / about_mean,
        "mse": math.fsum(error) / n,
        "cossim": math.fsum(product[i] / norm[i] / norm_out[i] for i in range(n)) / n,
        "l2_ratio": math.fsum(norm_out[i] / norm[i] for i in range(n)) / n,
        "relative_reconstruction_bias": math.fsum(value**2 for value in norm_out) / math.fsum(product),
        "l0": sum(uses) / n,
        "l1": math.fsum(float(value) for value in dense.ravel()) / n,
        "frac_alive": sum(use > 0 for use in uses) / ATOMS,
        **{f"freq_over_{name}_percent": len(some) / ATOMS for name, some in over.items()},
        **{f"normalized_freq_over_{name}_percent": sum(some) / sum(uses) for name, some in over.items()},
    }


def test_figures_are_those_of_slow_loops() -> None:
    hidden, codes, found = example()
    expected = slow_figures(hidden, codes, found)
    result = figures_of(hidden, codes, found)
    assert result == pytest.approx(expected, rel=1e-12)
    assert list(result) == list(expected)
    shares = [result[name] for name in ("frac_alive", "freq_over_1_percent", "freq_over_10_percent")]
    assert 1 > shares[0] > shares[1] > shares[2]
    assert 0 < result["normalized_freq_over_10_percent"] < result["normalized_freq_over_1_percent"] < 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=8), st.integers(1, 60), st.floats(-1e6, 1e6), st.integers(0, 100))
def test_chunks_do_not_matter(cuts: list[int], rows: int, offset: float, seed: int) -> None:
    hidden, codes, found = example(rows, seed)
    hidden, found = hidden + offset, found + offset
    whole, cut = figures_of(hidden, codes, found), figures_of(hidden, codes, found, tuple(cuts))
    undefined = {name for name, value in whole.items() if value is None}
    assert undefined == {name for name, value in cut.items() if value is None}
    for name in set(whole) - undefined:
        assert cut[name] == pytest.approx(whole[name], rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e8])
def test_the_mean_explains_nothing_and_the_truth_everything(offset: float) -> None:
    hidden, codes, _ = example()
    hidden = (hidden + offset * np.arange(1, DIM + 1)).astype(np.float32).astype(np.float64)
    mean = np.array([math.fsum(column) / len(hidden) for column in hidden.T])
    halves = figures_of(hidden, codes, np.tile(mean, (len(hidden), 1)), cuts=(100,))
    # where the mean itself has no more digits than this
    assert halves["explained_variance"] == pytest.approx(0, abs=1e-12)
    assert figures_of(hidden, codes, hidden, cuts=(7, 100))["explained_variance"] == 1
    if offset == 1e3:  # sums of squares about zero would call the mean a good reconstruction
        assert 1 - ((hidden - mean) ** 2).sum() / (hidden**2).sum() > 0.99


def test_a_variance_of_one_in_a_mean_of_a_hundred_million() -> None:
    rows = np.tile([[1e8 - 1.0], [1e8 + 1.0]], (50, DIM))
    found = rows + 0.5
    naive = (rows**2).sum() - len(rows) * (rows.mean(axis=0) ** 2).sum()
    codes = sp.csr_matrix((100, ATOMS))
    assert figures_of(rows, codes, found, cuts=(3, 50))["explained_variance"] == pytest.approx(0.75, rel=1e-12)
    assert abs(naive / (100 * DIM) - 1) > 0.1  # of the digits of the naive formula, none is left


def test_what_is_not_defined_is_none_and_json_stays_valid() -> None:
    def written(figures: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(figures, allow_nan=False))

    nothing = written(ReconstructionQuality(ATOMS, DIM).result())
    assert (nothing["tokens"], nothing["frac_alive"]) == (0, 0)
    assert {value for name, value in nothing.items() if name not in ("tokens", "frac_alive")} <= {None, 0}
    constant, codes = np.full((10, DIM), 7.0), sp.csr_matrix((10, ATOMS))
    for found in (constant, constant + 1):
        assert written(figures_of(constant, codes, found, cuts=(4,)))["explained_variance"] is None
    zero = written(figures_of(0 * constant, codes, 0 * constant))
    assert (zero["cossim"], zero["l2_ratio"], zero["relative_reconstruction_bias"], zero["mse"]) == (None,) * 3 + (0,)
    shrunk = written(figures_of(constant, codes, 0 * constant))
    assert (shrunk["cossim"], shrunk["l2_ratio"], shrunk["normalized_freq_over_1_percent"]) == (0, 0, None)


def test_a_row_of_zeros_has_no_direction() -> None:
    hidden, codes, found = example(20)
    expected = figures_of(hidden[1:], codes[1:], found[1:])
    hidden[0] = 0
    result = figures_of(hidden, codes, found)
    for name in ("cossim", "l2_ratio"):
        assert result[name] == pytest.approx(expected[name], rel=1e-12)


def test_stored_zeros_of_a_code_do_not_count() -> None:
    hidden, codes, found = example(20)
    padded = sp.csr_matrix(
        (np.append(codes.data, 0.0), np.append(codes.indices, 0), [*codes.indptr[:-1], codes.indptr[-1] + 1]),
        codes.shape,
    )
    assert figures_of(hidden, padded, found) == figures_of(hidden, codes, found)


def lasso_coder(hidden: np.ndarray) -> LassoCoder:
    return LassoCoder(AtomDictionary(normalize_rows(hidden[:ATOMS].astype(np.float32)), {"lambda": 0.1}))


def sae_coder(hidden: np.ndarray) -> SaeCoder:
    config = SaeConfig(activation="topk", k=3)
    return SaeCoder(SparseAutoencoder(config, random_weights(config, ATOMS, DIM)))


@pytest.mark.parametrize("make", [lasso_coder, sae_coder])
@pytest.mark.parametrize("as_rows", [np.asarray, torch.from_numpy])
def test_any_coder_is_judged(make: Any, as_rows: Any) -> None:
    hidden = example(80)[0].astype(np.float32)
    coder = make(hidden)
    codes = coder.encode(hidden).codes
    expected = slow_figures(hidden.astype(np.float64), codes, coder.reconstruct(hidden, codes).astype(np.float64))
    quality = ReconstructionQuality(ATOMS, DIM)
    for start in range(0, 80, 30):
        chunk = as_rows(hidden[start : start + 30])
        codes = coder.encode(chunk, threads=1).codes
        quality.add(chunk, codes, coder.reconstruct(chunk, codes))
    assert quality.result() == pytest.approx(expected, rel=1e-6)
    health = coder_health(hidden, coder)
    assert health == pytest.approx(quality.health(), rel=1e-6)
    assert (health["mean_nonzeros"], health["n_tokens"]) == (pytest.approx(expected["l0"]), 80)


def test_bad_rows_are_refused() -> None:
    hidden, codes, found = example(20)
    broken = hidden.copy()
    broken[3, 1] = np.nan
    for rows, reconstruction, what in ((broken, found, "hidden state"), (hidden, broken, "reconstruction")):
        with pytest.raises(ValueError, match=f"the {what} of row 3 holds NaN or infinity"):
            figures_of(rows, codes, reconstruction)
    infinite = codes.copy()
    infinite.data[2] = np.inf
    with pytest.raises(ValueError, match="the code holds NaN or infinity"):
        figures_of(hidden, infinite, found)
    with pytest.raises(ValueError, match=r"must both be \(n, 5\), got \(20, 5\) and \(20, 4\)"):
        figures_of(hidden, codes, found[:, :4])
    with pytest.raises(ValueError, match=r"codes must be \(20, 12\), got \(20, 11\)"):
        figures_of(hidden, codes[:, :11], found)
