"""``--optimizer muon``: which weights of each architecture it takes, its rates, and its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq import tasks
from torch import nn

from mlsm_plugin.fairseq_plugin.optimizers.fused_adamw import Muon, MuonConfig, mark_weights
from tests.conftest import CRITERIONS
from tests.tiny_models import TinyData
from tests.tiny_run import training_config


def config(**options: Any) -> Any:
    return MuonConfig(**{"lr": [1e-3], **options})


class Small(nn.Module):
    """A layer, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.embedding, self.head = nn.ModuleList([nn.Linear(4, 4)]), nn.Embedding(5, 4), nn.Linear(4, 5)
        mark_weights(self)

    def loss(self, step: int) -> Any:
        torch.manual_seed(step)
        return self.head(self.layers[0](self.embedding(torch.randint(5, (7,))))).square().sum()


def steps(model: Small, optimizer: Muon, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        optimizer.backward(model.loss(step))
        optimizer.set_lr(1e-3 / (1 + step))
        optimizer.step()


@pytest.mark.parametrize(
    ("task", "arch"),
    [
        ("plain_masked_lm", "mlsm_modern_tiny"),
        ("plain_masked_lm", "mlsm_roberta_tiny"),
        ("span_denoising", "denoising_small"),
    ],
)
def test_it_takes_the_matrices_of_the_layers(tiny: TinyData, task: str, arch: str) -> None:
    cfg = training_config(tiny.data_bin, task=task, criterion=CRITERIONS[task], arch=arch)
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    optimizer = Muon(config(decay_matrices_only=True, weight_decay=0.1), model.parameters())
    names = {id(one): name for name, one in model.named_parameters()}
    groups = [(group, [names[id(one)] for one in group["params"]]) for group in optimizer.param_groups]
    (muon,) = (own for group, own in groups if group["muon"])
    layered = {name for name, one in model.named_parameters() if ".layers." in name and one.dim() == 2}
    assert set(muon) == layered
    assert layered
    assert {group["weight_decay"] for group, own in groups if any("embed" in name for name in own)} == {0.0}
    assert sum(len(own) for _, own in groups) == len(names)


def test_rates_keep_their_ratio() -> None:
    for options, ratio in (({}, 10), ({"muon_lr": 0.003}, 3)):
        optimizer = Muon(config(**options), Small().parameters())
        for rate in (1e-3, 5e-4, 0.0):
            optimizer.set_lr(rate)
            assert optimizer.get_lr() == rate
            assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate, ratio * rate])


def test_loaded_state_continues_exactly_with_the_settings_of_this_run() -> None:
    model, other = Small(), Small()
    optimizer, whole = Muon(config(), model.parameters()), Muon(config(), other.parameters())
    steps(model, optimizer, range(3))
    steps(other, whole, range(6))
    again = Small()
    again.load_state_dict(model.state_dict())
    continued = Muon(config(), again.parameters())
    continued.load_state_dict(optimizer.state_dict(), {})
    steps(again, continued, range(3, 6))
    for name, value in other.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    changed = Muon(config(muon_momentum=0.8, muon_weight_decay=0.5), Small().parameters())
    changed.load_state_dict(optimizer.state_dict(), {})
    assert [(group["momentum"], group["weight_decay"]) for group in changed.param_groups if group["muon"]] == [
        (0.8, 0.5)
    ]
    changed.load_state_dict(optimizer.state_dict(), {"momentum": 0.7})
    assert [group["momentum"] for group in changed.param_groups if group["muon"]] == [0.7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"muon_lr": 0.0}, "--lr and --muon-lr must be positive"),
        ({"lr": [0.0]}, "--lr and --muon-lr must be positive"),
        ({"muon_momentum": 1.0}, r"--muon-momentum in \[0, 1\)"),
        ({"muon_weight_decay": -1.0}, "--muon-weight-decay not negative"),
        ({"muon_block_rows": 0}, "--muon-block-rows must be positive, got 0"),
        ({"adam_eps": 0.0}, "--adam-eps positive"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(config(**options), Small().parameters())


def test_one_vector_of_all_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--optimizer muon needs separate parameters .* --autocast bf16"):
        Muon(config(), [nn.Parameter(torch.zeros(9))])
