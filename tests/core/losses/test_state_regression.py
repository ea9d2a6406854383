"""The regression of hidden states against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlsm_plugin.core.losses.state_regression import StateRegression


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def regression(dim: int = 6, width: int = 4) -> StateRegression:
    torch.manual_seed(1)
    return StateRegression(width, dim)


def test_errors_are_squared_differences_of_standardized_states() -> None:
    layer = regression()
    sample = numbers(50, 6) * torch.tensor([1.0, 100.0, 0.01, 3.0, 1.0, 1.0]) + 7
    layer.standardize([sample[:20], sample[20:]])
    inputs = numbers(9, 4, seed=1)
    states = numbers(9, 6, seed=2) * 5
    mean = sample.double().numpy().mean(0)
    deviation = sample.double().numpy().std(0, ddof=1)
    weight, bias = (parameter.detach().double().numpy() for parameter in layer.projection.parameters())
    predictions = inputs.double().numpy() @ weight.T + bias
    expected = np.square(predictions - (states.double().numpy() - mean) / deviation).mean(1)
    np.testing.assert_allclose(layer(inputs, states).detach().numpy(), expected, rtol=1e-4)


def test_a_constant_prediction_of_the_mean_has_an_error_of_one() -> None:
    layer = regression()
    states = numbers(4000, 6) * torch.logspace(-3, 3, 6) - 2
    layer.standardize([states])
    torch.nn.init.zeros_(layer.projection.weight)
    assert float(layer(numbers(4000, 4), states).mean()) == pytest.approx(1, abs=1e-3)


def test_a_dimension_that_never_changes_has_no_infinite_error() -> None:
    layer = regression()
    states = numbers(30, 6)
    states[:, 2] = 5.0
    states[0, 2] += 1e-7  # rounding
    layer.standardize([states])
    assert float(layer.deviation[2]) == 1
    assert bool(layer(numbers(30, 4), states).isfinite().all())


def test_a_sample_is_read_until_it_is_enough() -> None:
    layer = regression()
    layer.standardize([numbers(10_000, 6), torch.full((3, 6), torch.nan)])
    assert bool(layer.mean.isfinite().all())


@pytest.mark.parametrize(("number", "warns"), [(199, True), (200, False)])
def test_a_small_sample_is_a_warning(number: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    regression().standardize([numbers(number, 6)])
    assert ("standardized by those of only 199 tokens" in caplog.text) is warns


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "the sample of the text has 0 tokens with a hidden state; pass more text"),
        ([torch.ones(1, 6)], "has 1 tokens"),
        ([torch.full((3, 6), torch.nan)], "hidden states that are not finite"),
    ],
)
def test_bad_samples_are_errors(samples: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regression().standardize(samples)


def test_tokens_without_a_state_have_no_error() -> None:
    states = numbers(40, 6) + 5
    with_none = torch.cat([states, torch.zeros(3, 6)])
    layers = [regression(), regression()]
    layers[0].standardize([states])
    layers[1].standardize([with_none])
    inputs = numbers(43, 4, seed=1)
    errors = layers[1](inputs, with_none)
    assert torch.equal(errors[:40], layers[0](inputs[:40], states))
    assert torch.equal(errors[40:], torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_tokens_give_a_zero_with_gradients(dtype: torch.dtype) -> None:
    layer = regression().to(dtype)
    layer(torch.zeros(0, 4, dtype=dtype), torch.zeros(0, 6)).sum().backward()
    assert all(bool((parameter.grad == 0).all()) for parameter in layer.parameters() if parameter.grad is not None)
    assert layer.projection.weight.grad is not None
