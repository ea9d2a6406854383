"""Screened latents are those of float32, also where bfloat16 leaves nearly everything open."""

from __future__ import annotations

import pytest
import torch

from mlsm_plugin.core.sparse_coding import sae_screening
from mlsm_plugin.core.sparse_coding.sae_screening import Screen, screen_of
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder
from tests.core.sparse_coding.sae_weights import random_weights

NUM_ATOMS, DIM = 600, 24


def sae_of(activation: str, *, alike: float = 0.0, seed: int = 0) -> SparseAutoencoder:
    """With random weights, or with rows of the encoder that differ from one by ``alike`` only."""
    config = SaeConfig(activation, 9 if activation == "topk" else None, input_norm="constant_norm")
    weights = random_weights(config, NUM_ATOMS, DIM, seed)
    if alike:
        weights = weights._replace(encoder=weights.encoder[:1] + alike * weights.encoder, encoder_bias=torch.zeros(600))
    if weights.threshold is not None:
        weights = weights._replace(threshold=weights.threshold + 12)
    return SparseAutoencoder(config, weights)


def dense(sae: SparseAutoencoder, found: tuple[torch.Tensor, ...], rows: int) -> torch.Tensor:
    latents = torch.zeros(rows, sae.num_atoms)
    latents[found[0], found[1]] = found[2]
    return latents


@pytest.mark.parametrize("activation", ["topk", "jumprelu"])
@pytest.mark.parametrize("alike", [0.0, 0.02, 1e-3])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_equal_to_float32(activation: str, alike: float, scale: float) -> None:
    sae = sae_of(activation, alike=alike)
    hidden = scale * torch.randn(300, DIM, generator=torch.Generator().manual_seed(3))
    hidden[5] = 0
    found = Screen(sae).latents(hidden)
    if found is None:  # too many candidates
        assert alike > 0
        assert activation == "jumprelu"
        return
    assert bool((found[0].diff() >= 0).all())
    wanted, latents = sae.latents(hidden), dense(sae, found, 300)
    differ = ((wanted > 0) != (latents > 0)).any(1)
    assert float(differ.float().mean()) <= 0.02  # two latents closer than the rounding of float32
    torch.testing.assert_close(latents[~differ], wanted[~differ], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(latents.sort(1).values, wanted.sort(1).values, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("activation", ["topk", "jumprelu"])
def test_the_bound_holds(activation: str) -> None:
    """The largest errors of bfloat16 are of the size of the bound, and never above it."""
    sae = sae_of(activation)
    screen = Screen(sae)
    hidden = sae.normalized(torch.randn(2000, DIM, generator=torch.Generator().manual_seed(4)))[0]
    x = hidden - sae.weights.decoder_bias
    rough = torch.addmm(screen.bias, x.bfloat16(), screen.encoder.T).double()
    exact = x.double() @ sae.weights.encoder.double().T + sae.weights.encoder_bias.double()
    rounded = x.bfloat16().float()
    bound = (x - rounded).norm(dim=1) * screen.largest_norm + rounded.norm(dim=1) * screen.encoder_error
    share = ((rough - exact).abs() - rough.abs() * sae_screening.ROUNDING) / (bound + screen.bias_error)[:, None]
    assert 0.1 < float(share.max()) <= 1


def test_no_rows() -> None:
    for activation in ("topk", "jumprelu"):
        found = Screen(sae_of(activation)).latents(torch.zeros(0, DIM))
        assert found is not None
        assert [len(part) for part in found] == [0, 0, 0]


def test_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SaeConfig("topk", 70)
    assert Screen(SparseAutoencoder(config, random_weights(config, NUM_ATOMS, DIM))).latents(torch.ones(2, DIM)) is None
    monkeypatch.setattr(sae_screening, "_is_fast", lambda: True)
    assert screen_of(sae_of("topk")) is not None
    rescaled = SaeConfig("jumprelu", rescale_by_decoder_norm=True)
    for config in (SaeConfig("relu"), SaeConfig("gated"), rescaled):
        weights: SaeWeights = random_weights(config, NUM_ATOMS, DIM)
        assert screen_of(SparseAutoencoder(config, weights)) is None
    monkeypatch.setattr(sae_screening, "_is_fast", lambda: False)
    assert screen_of(sae_of("topk")) is None
