"""The encoders as one compiled graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens
from mlsm_plugin.fairseq_plugin.models.deberta_layers import DebertaSize, DebertaTransformer
from mlsm_plugin.fairseq_plugin.models.modern_layers import ModernSize, ModernTransformer

pytestmark = pytest.mark.slow  # a compilation takes several seconds
SIZE = ModernSize(num_symbols=60, padding=1, layers=2, dim=32, ffn_dim=48, heads=2, window=8)
DEBERTA = DebertaSize(num_symbols=60, padding=1, layers=2, dim=32, ffn_dim=48, heads=2, buckets=8, longest=24)


@pytest.fixture(params=["modern", "deberta"])
def encoder(request: pytest.FixtureRequest) -> ModernTransformer:
    torch._dynamo.reset()
    torch.manual_seed(1)
    kind, size = (ModernTransformer, SIZE) if request.param == "modern" else (DebertaTransformer, DEBERTA)
    model = kind(size, nn.Embedding(SIZE.num_symbols, SIZE.dim, SIZE.padding))
    model.draw_weights_by_width()
    return model


def batch(padded: bool) -> tuple[Tensor, ChosenTokens]:
    torch.manual_seed(2)
    tokens = torch.randint(4, SIZE.num_symbols, (3, 20))
    tokens[2, 15:] = SIZE.padding if padded else 7
    chosen = torch.rand(3, 20) < 0.2
    return tokens, ChosenTokens.of(chosen, (int(chosen.sum()), 10, 20))


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_one_graph_holds_it(encoder: ModernTransformer, padded: bool, chooses: bool) -> None:
    tokens, chosen = batch(padded)
    only = chosen if chooses else None
    explained = torch._dynamo.explain(encoder)(tokens, has_padding=padded, only=only)
    assert explained.graph_break_count == 0, explained.break_reasons


@pytest.mark.parametrize(("backend", "chooses"), [("aot_eager", False), ("inductor", True)])
def test_it_computes_the_same(encoder: ModernTransformer, backend: str, chooses: bool) -> None:
    tokens, chosen = batch(padded=False)
    only, weights = chosen if chooses else None, torch.randn(SIZE.dim)
    compiled = torch.compile(encoder, fullgraph=True, dynamic=False, backend=backend)

    def results(model: Any, *, bf16: bool) -> list[Tensor]:
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = model(tokens, has_padding=False, only=only)["encoder_out"][0]
        assert hidden.dtype == (torch.bfloat16 if bf16 else torch.float32)
        (hidden.float() @ weights).square().sum().backward()
        return [hidden.float(), *(one.grad.clone() for one in encoder.parameters())]

    whole = results(encoder, bf16=False)
    for expected, found in zip(whole, results(compiled, bf16=False), strict=True):
        assert (expected - found).norm() <= 1e-5 * expected.norm()
    if isinstance(encoder, DebertaTransformer):  # `--compile on` refuses it in bfloat16 on a CPU
        return
    halves = zip(whole, results(encoder, bf16=True), results(compiled, bf16=True), strict=True)
    for expected, half, found in halves:  # as far from float32 as without compiling
        assert (found - expected).norm() <= 1.5 * (half - expected).norm()


def test_gradients_are_finite_at_real_sizes() -> None:
    """With plain products in the attention, the compiler of torch 2.13 made NaNs of them on the CPU."""
    torch._dynamo.reset()
    size = ModernSize(num_symbols=60, padding=1, layers=1, dim=128, ffn_dim=256, heads=2)
    model = ModernTransformer(size, nn.Embedding(60, 128, 1))
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = compiled(torch.randint(4, 60, (2, 128)), has_padding=False)["encoder_out"][0]
    (hidden.float() @ torch.randn(128)).square().sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
