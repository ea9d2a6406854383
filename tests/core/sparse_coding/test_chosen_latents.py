"""The largest values of rows, and products with chosen places, compared with plain dense ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding import sparse_autoencoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import ChosenLatents, largest, largest_of_all


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 6),
    width=st.integers(1, 1200),
    k=st.integers(1, 60),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 1000),
)
def test_largest_values_of_each_row(rows: int, width: int, k: int, dtype: torch.dtype, seed: int) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    k = min(k, width)
    found, columns = largest(values, k)
    assert columns.shape == (rows, k)
    assert torch.equal(found, values.gather(1, columns))
    assert all(len(set(row)) == k for row in columns.tolist())
    assert torch.equal(found.sort(1).values, values.sort(1).values[:, width - k :])


def test_long_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0))
    grouped = largest(values, 42)[1].sort(1).values
    monkeypatch.setattr(sparse_autoencoder, "FEWEST_GROUPED", 10**9)
    assert torch.equal(grouped, largest(values, 42)[1].sort(1).values)


@pytest.mark.parametrize("bar", [-10.0, 0.5, 10.0])
def test_largest_values_of_all(bar: float) -> None:
    values = torch.randn(7, 20, generator=torch.Generator().manual_seed(1))
    places = largest_of_all(values, 15, bar)
    assert places.tolist() == sorted(values.flatten().argsort(descending=True)[:15].tolist())


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_the_dense_matrix(dense: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, columns = torch.tensor([0, 0, 2, 2, 2, 4]), torch.tensor([5, 1, 0, 6, 1, 1])
    values = torch.randn(6, generator=generator, dtype=dtype)
    left, right = (torch.randn(size, 3, generator=generator, dtype=dtype) for size in (5, 7))
    matrix = torch.zeros(5, 7, dtype=dtype)
    matrix[rows, columns] = values
    chosen = ChosenLatents(rows, columns, (5, 7))
    chosen.dense = dense
    for found, wanted in (
        (chosen.products(left, right), (left @ right.T)[rows, columns]),
        (chosen.times(values, right), matrix @ right),
        (chosen.transposed_times(values, left), matrix.T @ left),
        (chosen.sums(values), matrix.sum(0)),
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_products_do_not_make_other_warnings_appear_again() -> None:
    code = """
import warnings, torch
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import ChosenLatents
def product():
    latents = ChosenLatents(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]), (2, 3))
    return latents.times(torch.ones(3), torch.ones(3, 4)).sum().item()
product()
for _ in range(3):
    warnings.warn("said once", FutureWarning)
    print(product())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["12.0"] * 3
    assert found.stderr.count(": FutureWarning: ") == 1
    assert "CSR" not in found.stderr
