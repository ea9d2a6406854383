"""Muon and AdamW as one optimizer: which weights each of them changes, how, and their state in checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

from mlsm_plugin.core.optimizers import muon
from mlsm_plugin.core.optimizers.muon import (
    Muon,
    MuonAdamW,
    matrices_of_layers,
    orthogonalized,
    orthogonalized_in_blocks,
)


@pytest.fixture(params=[True, False], ids=["fast in bfloat16", "slow in bfloat16"])
def fast_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether matrix products of this machine are taken to be fast in bfloat16."""
    fast: bool = request.param
    monkeypatch.setattr(muon, "has_fast_bf16", lambda device: fast)
    return fast


class Small(nn.Module):
    """An embedding, two layers of a matrix and a vector, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.layers = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 6)])

    def loss(self, step: int) -> Any:
        ids = torch.randint(9, (20,), generator=torch.Generator().manual_seed(step))
        hidden = self.layers[1](self.layers[0](self.embedding(ids)).relu())
        return nn.functional.cross_entropy(self.head(hidden), ids)


def optimizer_of(model: nn.Module, **settings: Any) -> MuonAdamW:
    matrices = matrices_of_layers(model)
    chosen = {id(one) for one in matrices}
    others = [one for one in model.parameters() if id(one) not in chosen]
    return MuonAdamW(matrices, [{"params": others}], **{"lr": 1e-3, **settings})


def steps(model: Small, optimizer: MuonAdamW, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()


@pytest.mark.parametrize("block_rows", [None, 2])
def test_each_part_does_what_it_does_alone(block_rows: int | None) -> None:
    settings = {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-5}
    model, other = Small(), Small()
    optimizer = optimizer_of(
        model, **settings, muon_lr=0.05, momentum=0.9, muon_weight_decay=0.2, block_rows=block_rows
    )
    matrices = [layer.weight for layer in other.layers]
    rest = [one for one in other.parameters() if all(one is not matrix for matrix in matrices)]
    alone = [
        torch.optim.AdamW(rest, fused=True, **settings),
        Muon(matrices, lr=0.05, momentum=0.9, weight_decay=0.2, block_rows=block_rows),
    ]
    for step in range(4):
        steps(model, optimizer, range(step, step + 1))
        other.zero_grad()
        other.loss(step).backward()
        for one in alone:
            one.step()
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found, expected), name


def blocks_orthogonalized_slowly(matrix: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Block by block in float64, with the Gram matrix of each iteration made anew."""
    rows, columns = matrix.shape
    size = min(block_rows, rows, columns)
    parts = []
    for first in range(0, rows, size):
        block = matrix[first : first + size].double()
        scales = (block @ block.T).abs().sum(dim=1).clamp(min=1e-7).rsqrt()
        block = torch.diag(scales) @ block
        for _ in range(3):
            gram = block @ block.T
            block = 3.4445 * block - 4.7750 * gram @ block + 2.0315 * gram @ gram @ block
        parts.append(block)
    result = torch.cat(parts)
    return result * min(rows, columns) ** 0.5 / torch.linalg.norm(result)


@pytest.mark.parametrize(
    ("shape", "block_rows"), [((12, 6), 4), ((6, 12), 4), ((8, 8), 8), ((70, 20), 64), ((5, 9), 2)]
)
def test_blocks_of_rows_are_orthogonalized(shape: tuple[int, int], block_rows: int, fast_bf16: bool) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    result = orthogonalized_in_blocks(matrix, block_rows)
    expected = blocks_orthogonalized_slowly(matrix, block_rows)
    tolerance = 0.02 if fast_bf16 else 1e-5
    assert result.dtype == torch.float32
    assert float((result.double() - expected).abs().max()) < tolerance * float(expected.abs().max())
    assert float(result.norm()) == pytest.approx(min(shape) ** 0.5, rel=1e-5)


def test_rows_of_a_block_are_nearly_orthonormal() -> None:
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(256, 128, generator=generator) @ torch.diag(torch.logspace(0, -2, 128))
    blocks = orthogonalized_in_blocks(matrix).view(4, 64, 128)
    norm = float(blocks.norm()) / 256**0.5  # of a row
    for values in torch.linalg.svdvals(blocks) / norm:
        assert float(values.min()) > 0.4
        assert float(values.max()) < 1.5


@pytest.mark.parametrize("shape", [(12, 6), (6, 12), (8, 8), (1, 5)])
def test_whole_matrices_are_orthogonalized(shape: tuple[int, int], fast_bf16: bool) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    expected = matrix.double() / torch.linalg.norm(matrix.double())
    for _ in range(5):
        gram = expected @ expected.T
        expected = 3.4445 * expected - 4.7750 * gram @ expected + 2.0315 * gram @ gram @ expected
    result = orthogonalized(matrix)
    tolerance = 0.06 if fast_bf16 else 1e-5
    assert result.dtype == torch.float32
    assert float((result.double() - expected).abs().max()) < tolerance * float(expected.abs().max())
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    assert float((result.double() * (left @ right)).sum()) == pytest.approx(
        min(shape), rel=0.35
    )  # values from 0.68 to 1.13


@pytest.mark.parametrize("function", [orthogonalized, orthogonalized_in_blocks])
@pytest.mark.parametrize("shape", [(3, 3), (1, 7), (7, 1)])
def test_a_gradient_of_zeros_moves_nothing(shape: tuple[int, int], function: Callable[[Any], Any]) -> None:
    assert torch.equal(function(torch.zeros(shape)), torch.zeros(shape))
    assert bool(function(torch.full(shape, 1e-20)).isfinite().all())


@pytest.mark.parametrize("shape", [(12, 6), (6, 12), (8, 8)])
def test_a_matrix_moves_along_its_orthogonalized_gradient(shape: tuple[int, int]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(shape[1], shape[0], bias=False)])
    weight = model.layers[0].weight
    before = weight.detach().clone()
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    weight.grad = gradient.clone()
    MuonAdamW([weight], [{"params": [nn.Parameter(torch.zeros(3))]}], lr=1.0, muon_lr=0.5).step()
    moved = (before - weight.detach()) / (0.5 * max(1, shape[0] / shape[1]) ** 0.5)
    # the first average of the gradients is 0.05 of the gradient, and the scale of a gradient does not matter
    assert torch.allclose(moved, orthogonalized(gradient), atol=0.05)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_the_state_of_the_muon_of_torch_is_loaded() -> None:
    model = Small()
    optimizer = optimizer_of(model)
    steps(model, optimizer, range(2))
    state = optimizer.state_dict()
    matrices = matrices_of_layers(model)
    saved = torch.optim.Muon(matrices, lr=0.02).state_dict()["param_groups"][0]
    for group in state["param_groups"]:
        if group["muon"]:
            group.update({name: value for name, value in saved.items() if name != "params"})
    optimizer.load_state_dict(state)
    steps(model, optimizer, range(2, 4))
    assert all(bool(matrix.isfinite().all()) for matrix in matrices)


def test_a_scheduler_keeps_the_ratio_and_ten_is_the_default() -> None:
    model = Small()
    optimizer = optimizer_of(model, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([1e-3 / (1 + step), 1e-2 / (1 + step)])
        steps(model, optimizer, range(step, step + 1))
        scheduler.step()


def test_loaded_state_continues_exactly() -> None:
    model = Small()
    optimizer = optimizer_of(model, lr=5e-3)
    steps(model, optimizer, range(3))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    steps(model, optimizer, range(3, 6))
    other = Small()
    other.load_state_dict(weights)
    continued = optimizer_of(other, lr=1.0)
    continued.load_state_dict(saved)
    steps(other, continued, range(3, 6))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


SIZE = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("model", "number"),
    [
        (BertForMaskedLM(BertConfig(**SIZE)), 2 * 6),
        (ModernBertForMaskedLM(ModernBertConfig(**SIZE, pad_token_id=0)), 2 * 4),
    ],
    ids=["bert", "modernbert"],
)
def test_matrices_are_those_of_the_layers(model: nn.Module, number: int) -> None:
    found = {id(one) for one in matrices_of_layers(model)}
    names = [name for name, one in model.named_parameters() if id(one) in found]
    assert len(names) == number
    assert all(".layer" in name and name.endswith(".weight") for name in names)


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(ValueError, match="there is no matrix of a layer"):
        MuonAdamW([], [{"params": list(Small().parameters())}], lr=1e-3)
