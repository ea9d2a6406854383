"""Latents and reconstructions, compared with formulas in float64 that share no code with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding.sparse_autoencoder import ACTIVATIONS, SaeConfig, SaeWeights, SparseAutoencoder
from tests.core.sparse_coding.sae_weights import random_weights


def oracle(config: SaeConfig, weights: SaeWeights, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Latents and reconstructions, one hidden state and one latent at a time."""
    own = {name: None if value is None else value.double().numpy() for name, value in weights._asdict().items()}
    latents = np.zeros((len(hidden), len(own["encoder"])))
    reconstructions = np.zeros_like(hidden)
    for row, x in enumerate(hidden):
        scale, shift = 1.0, 0.0
        if config.input_norm == "constant_norm":
            scale = (x @ x) ** 0.5 / len(x) ** 0.5 or 1.0
            z = x / scale
        elif config.input_norm == "layer_norm":
            shift, scale = x.mean(), x.std(ddof=1)
            z = (x - shift) / (scale + 1e-5)
        else:
            z = x
        z = z - own["decoder_bias"] * config.subtract_decoder_bias
        pre = [z @ encoder + bias for encoder, bias in zip(own["encoder"], own["encoder_bias"], strict=True)]
        norms = [1.0] * len(pre)
        if config.rescale_by_decoder_norm:
            norms = [(atom @ atom) ** 0.5 for atom in own["decoder"]]
        pre = [value * norm for value, norm in zip(pre, norms, strict=True)]
        strongest = sorted(range(len(pre)), key=lambda atom: -pre[atom])[: config.k]
        for atom, value in enumerate(pre):
            if config.activation == "topk":
                value = value if atom in strongest else 0.0
            elif config.activation == "jumprelu":
                value = value if value > own["threshold"][atom] else 0.0
            elif config.activation == "gated":
                gate = value > 0
                value = np.exp(own["gate_scale"][atom]) * (z @ own["encoder"][atom]) + own["gate_bias"][atom]
                value = value if gate else 0.0
            latents[row, atom] = max(value, 0.0)
        summed = own["decoder_bias"].copy()
        for atom, value in enumerate(latents[row]):
            summed += value / norms[atom] * own["decoder"][atom]
        reconstructions[row] = summed * scale + shift
    return latents, reconstructions


@settings(max_examples=60, deadline=None)
@given(
    activation=st.sampled_from(ACTIVATIONS),
    input_norm=st.sampled_from(("none", "constant_norm", "layer_norm")),
    subtract=st.booleans(),
    rescale=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equal_to_the_formulas(activation: str, input_norm: str, subtract: bool, rescale: bool, seed: int) -> None:
    config = SaeConfig(
        activation, 3 if activation == "topk" else None, subtract, input_norm, rescale and activation != "gated"
    )
    weights = random_weights(config, num_atoms=12, dim=6, seed=seed)
    hidden = np.random.default_rng(seed).normal(size=(5, 6)) * 3 + 1
    wanted, wanted_reconstructions = oracle(config, weights, hidden.astype(np.float32).astype(np.float64))
    sae = SparseAutoencoder(config, weights)
    latents = sae.latents(torch.from_numpy(hidden))
    assert np.allclose(latents.numpy(), wanted, atol=2e-5, rtol=1e-5)
    found = sae.reconstructed(latents, torch.from_numpy(hidden))
    assert np.allclose(found.numpy(), wanted_reconstructions, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("input_norm", ["none", "constant_norm", "layer_norm"])
def test_a_row_of_zeros_is_finite(input_norm: str) -> None:
    config = SaeConfig("relu", input_norm=input_norm)
    sae = SparseAutoencoder(config, random_weights(config, 4, 3))
    latents = sae.latents(torch.zeros(2, 3))
    assert latents.isfinite().all()
    assert sae.reconstructed(latents, torch.zeros(2, 3)).isfinite().all()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"activation": "tanh"}, "'tanh' is not one of relu"),
        ({"activation": "topk"}, "k must be a whole number"),
        ({"activation": "topk", "k": True}, "k must be a whole number"),
        ({"activation": "relu", "k": 3}, "k must be a whole number .* absent otherwise"),
        ({"input_norm": "batch"}, "input norm 'batch'"),
        ({"subtract_decoder_bias": 1}, "true or false"),
        ({"activation": "gated", "rescale_by_decoder_norm": True}, "gated"),
    ],
)
def test_configurations_that_mean_nothing(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SaeConfig(**config)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"encoder": torch.zeros(4)}, r"must be \(n_atoms, dim\)"),
        ({"encoder": torch.zeros(0, 3)}, "not empty"),
        ({"decoder": torch.zeros(3, 4)}, r"decoder has the shape \(3, 4\), but must have \(4, 3\)"),
        ({"encoder_bias": torch.zeros(3)}, "encoder_bias has the shape"),
        ({"decoder_bias": torch.full((3,), float("nan"))}, "decoder_bias holds NaN"),
        ({"threshold": None}, "threshold is missing"),
        ({"gate_bias": torch.zeros(4)}, "gate_bias does not belong"),
    ],
)
def test_weights_that_do_not_fit(change: dict[str, Any], problem: str) -> None:
    config = SaeConfig("jumprelu")
    weights = random_weights(config, 4, 3)
    with pytest.raises(ValueError, match=problem):
        SparseAutoencoder(config, weights._replace(**change))
    with pytest.raises(ValueError, match="only 4 latents"):
        SparseAutoencoder(SaeConfig("topk", 5), weights._replace(threshold=None))
