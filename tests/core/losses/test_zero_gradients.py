"""The zero that gives unused parameters a gradient."""

from __future__ import annotations

import pytest
import torch

from mlsm_plugin.core.losses.zero_gradients import zero_with_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_idle_parameters_get_zeros_and_others_keep_their_gradient(dtype: torch.dtype) -> None:
    large = torch.nn.Parameter(torch.full((300, 200), 100.0, dtype=dtype))  # their sum overflows in half precision
    scalar, used = torch.nn.Parameter(torch.tensor(2.0, dtype=dtype)), torch.nn.Parameter(torch.tensor(3.0))
    loss = zero_with_gradient([large, scalar]) + used.square()
    assert float(loss.detach()) == 9
    loss.backward()
    for parameter in (large, scalar):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    assert used.grad is not None
    assert float(used.grad) == 6


def test_frozen_parameters_and_none_at_all_are_no_obstacle() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert zero_with_gradient([frozen]).item() == zero_with_gradient([]).item() == 0
    assert not zero_with_gradient([frozen]).requires_grad
