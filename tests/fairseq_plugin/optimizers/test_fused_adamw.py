"""The fused AdamW against the formula in float64, its groups, and its state in checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mlsm_plugin.fairseq_plugin.optimizers.fused_adamw import FusedAdamW, FusedAdamWConfig, decay_groups, mark_weights


def config(**options: Any) -> Any:
    return FusedAdamWConfig(**{"lr": [0.1], "weight_decay": 0.5, **options})


class Small(nn.Module):
    """A matrix, a vector and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(5, 4), nn.Linear(4, 3)

    def loss(self, step: int) -> Any:
        torch.manual_seed(step)
        return self.linear(self.embedding(torch.randint(5, (7,)))).square().sum()


def steps(model: Small, optimizer: FusedAdamW, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        optimizer.backward(model.loss(step))
        optimizer.set_lr(0.1 / (1 + step))
        optimizer.step()


@pytest.mark.parametrize("matrices_only", [False, True])
def test_updates_are_those_of_the_formula(matrices_only: bool) -> None:
    model, own = Small(), Small().double()
    mark_weights(model)
    cfg = config(adam_betas="(0.7, 0.9)", adam_eps=1e-3, decay_matrices_only=matrices_only)
    optimizer = FusedAdamW(cfg, model.parameters())
    steps(model, optimizer, range(4))
    averages = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in own.named_parameters()}
    for step in range(4):  # Loshchilov and Hutter, 2019, algorithm 2
        own.zero_grad()
        own.loss(step).backward()
        rate = 0.1 / (1 + step)
        for name, parameter in own.named_parameters():
            gradient = parameter.grad
            first, second = averages[name]
            first.mul_(0.7).add_(0.3 * gradient)
            second.mul_(0.9).add_(0.1 * gradient**2)
            move = (first / (1 - 0.7 ** (step + 1))) / ((second / (1 - 0.9 ** (step + 1))).sqrt() + 1e-3)
            decay = 0.5 if name == "linear.weight" or not matrices_only else 0.0
            parameter.data -= rate * (move + decay * parameter.data)
    for (name, found), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5, msg=name)


def test_groups_are_matrices_and_the_rest() -> None:
    model = Small()
    mark_weights(model)
    decayed, others = decay_groups(list(model.parameters()), 0.5)
    assert [id(p) for p in decayed["params"]] == [id(model.linear.weight)]
    assert {id(p) for p in others["params"]} == {id(model.linear.bias), id(model.embedding.weight)}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)


def test_one_vector_of_all_parameters_has_no_matrices() -> None:
    with pytest.raises(ValueError, match="--decay-matrices-only needs separate parameters: use --autocast bf16"):
        FusedAdamW(config(decay_matrices_only=True), [nn.Parameter(torch.zeros(9))])


@pytest.mark.parametrize("matrices_only", [False, True])
def test_loaded_state_continues_exactly_with_the_settings_of_this_run(matrices_only: bool) -> None:
    cfg = config(decay_matrices_only=matrices_only)
    model = Small()
    optimizer = FusedAdamW(cfg, model.parameters())
    steps(model, optimizer, range(3))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    steps(model, optimizer, range(3, 6))
    other = Small()
    other.load_state_dict(weights)
    continued = FusedAdamW(cfg, other.parameters())
    continued.load_state_dict(saved, {"lr": 0.7})
    assert continued.get_lr() == 0.7
    steps(other, continued, range(3, 6))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    options = {"weight_decay": 0.25, "adam_betas": (0.5, 0.6), "adam_eps": 1e-3}
    changed = FusedAdamW(config(**options, decay_matrices_only=matrices_only), Small().parameters())
    changed.load_state_dict(saved, {})  # fairseq's trainer passes what --optimizer-overrides has
    assert [group["weight_decay"] for group in changed.param_groups] == ([0.25, 0.0] if matrices_only else [0.25])
    assert {(*group["betas"], group["eps"]) for group in changed.param_groups} == {(0.5, 0.6, 1e-3)}
    assert changed.get_lr() == saved["param_groups"][0]["lr"]  # reduce_lr_on_plateau relies on it
    changed.load_state_dict(saved, {"weight_decay": 0.125, "eps": 0.5})
    assert {(*group["betas"], group["eps"], group["weight_decay"]) for group in changed.param_groups} == {
        (0.5, 0.6, 0.5, 0.125)
    }


@pytest.mark.parametrize("matrices_only", [False, True])
@pytest.mark.parametrize("symbols", [4, 6])
def test_averages_of_another_size_are_refused(symbols: int, matrices_only: bool) -> None:
    cfg, model = config(decay_matrices_only=matrices_only), Small()
    optimizer = FusedAdamW(cfg, model.parameters())
    steps(model, optimizer, range(1))
    other = Small()
    other.embedding = nn.Embedding(symbols, 4)
    with pytest.raises(ValueError, match="loaded state dict has averages of another size"):
        FusedAdamW(cfg, other.parameters()).load_state_dict(optimizer.state_dict())
    one = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="loaded state dict contains a parameter group that doesn't match"):
        FusedAdamW(cfg, one.parameters()).load_state_dict(optimizer.state_dict())


def test_state_with_other_groups_is_refused() -> None:
    saved = FusedAdamW(config(decay_matrices_only=True), Small().parameters()).state_dict()
    with pytest.raises(ValueError, match="--decay-matrices-only differs from the run in the checkpoint"):
        FusedAdamW(config(), Small().parameters()).load_state_dict(saved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adam_betas": "(0.9,)"}, r"--adam-betas must be two numbers, such as '\(0.9, 0.98\)', got '\(0.9,\)'"),
        ({"adam_betas": "__import__('os').getcwd()"}, "--adam-betas must be two numbers"),
        ({"adam_betas": (0.9, 1.0)}, r"--adam-betas must be in \[0, 1\)"),
        ({"adam_eps": 0.0}, "--adam-eps positive"),
        ({"weight_decay": -1.0}, "--weight-decay not negative"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdamW(config(**options), Small().parameters())


def test_other_kernels_where_none_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.optim.AdamW

    def without_fused(*given: Any, fused: bool = False, **settings: Any) -> Any:
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be on other devices")
        return original(*given, **settings)

    monkeypatch.setattr(torch.optim, "AdamW", without_fused)
    model = Small()
    optimizer = FusedAdamW(config(), model.parameters())
    before = model.linear.weight.clone()
    steps(model, optimizer, range(1))
    assert not torch.equal(model.linear.weight, before)
