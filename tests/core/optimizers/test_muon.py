"""Muon and AdamW as one optimizer: which weights each of them changes, how, and their state in checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

from mlsm_plugin.core.optimizers.muon import MuonAdamW, matrices_of_layers


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


def test_each_part_does_what_torch_does_alone() -> None:
    settings = {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-5}
    model, other = Small(), Small()
    optimizer = optimizer_of(model, **settings, muon_lr=0.05, momentum=0.9, muon_weight_decay=0.2)
    matrices = [layer.weight for layer in other.layers]
    rest = [one for one in other.parameters() if all(one is not matrix for matrix in matrices)]
    alone = [
        torch.optim.AdamW(rest, fused=True, **settings),
        torch.optim.Muon(matrices, lr=0.05, momentum=0.9, weight_decay=0.2),
    ]
    for step in range(4):
        steps(model, optimizer, range(step, step + 1))
        other.zero_grad()
        other.loss(step).backward()
        for one in alone:
            one.step()
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("shape", [(12, 6), (6, 12), (8, 8)])
def test_a_matrix_moves_along_the_orthogonal_factor_of_its_gradient(shape: tuple[int, int]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(shape[1], shape[0], bias=False)])
    weight = model.layers[0].weight
    before = weight.detach().clone()
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    weight.grad = gradient.clone()
    MuonAdamW([weight], [{"params": [nn.Parameter(torch.zeros(3))]}], lr=1.0, muon_lr=0.5).step()
    left, _, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    scale = 0.5 * max(1, shape[0] / shape[1]) ** 0.5
    moved = left.T @ ((before - weight.detach()).double() / scale) @ right.T
    values = moved.diagonal()  # five steps of Newton and Schulz bring the singular values near 1, not to it
    assert bool(((values > 0.5) & (values < 1.4)).all())
    assert float((moved - torch.diag(values)).abs().max()) < 0.05  # in bfloat16


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


def test_what_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no matrix of a layer"):
        MuonAdamW([], [{"params": list(Small().parameters())}], lr=1e-3)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"has no Muon; install torch 2.9 or newer"):
        optimizer_of(Small())
