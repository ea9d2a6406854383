"""Weights that are no numbers."""

from __future__ import annotations

import pytest
import torch

from mlsm_plugin.core.files.finite_weights import check_finite_weights


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_number_is_enough(value: float, dtype: torch.dtype) -> None:
    weights = {"first": torch.ones(3, dtype=dtype), "second": torch.ones(2, 4, dtype=dtype)}
    check_finite_weights(weights.items(), "model")
    weights["second"][1, 3] = value
    with pytest.raises(ValueError, match=r"^model has weights that are not finite \(second\): it is damaged, or"):
        check_finite_weights(weights.items(), "model")


def test_counts_are_no_weights_and_large_numbers_are_finite() -> None:
    large = torch.full((9,), torch.finfo(torch.float16).max, dtype=torch.float16)
    check_finite_weights([("count", torch.tensor(3)), ("large", large)], "model")
