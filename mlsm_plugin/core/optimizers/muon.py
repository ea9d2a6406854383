"""Muon (Jordan et al., 2024) for the matrices of the layers and AdamW for all other weights, as one optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

MUON_RATIO = 10.0  # the rate of Muon is this many times that of AdamW where nothing else is asked for


class MuonAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` on the matrices of the layers, and ``torch.optim.AdamW`` on everything else.

    Both work on the groups of this optimizer: its state is that of both, and a scheduler that multiplies the rate of
    each group keeps their ratio. The update of a matrix ``(m, n)`` is scaled by ``sqrt(max(1, m / n))``, as in the
    original. ValueError if this torch has no Muon, there is no matrix, or a value is out of range.

    Args:
        matrices: those of :func:`matrices_of_layers`.
        others: all other parameters, as groups of AdamW, each perhaps with a ``weight_decay`` of its own.
        lr, betas, eps, weight_decay: of AdamW.
        muon_lr, momentum, muon_weight_decay: of Muon, whose momentum is Nesterov's.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        muon_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        muon_weight_decay: float = 0.0,
    ) -> None:
        if not has_muon():
            raise ValueError(f"torch {torch.__version__} has no Muon; install torch 2.9 or newer")
        if not matrices:
            raise ValueError("there is no matrix of a layer among the parameters, and only those are for Muon")
        self._parts: list[torch.optim.Optimizer] = []
        super().__init__(
            [*({**group, "muon": False} for group in others), {"params": list(matrices), "muon": True}], {}
        )
        of_adamw: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        of_muon: dict[str, Any] = {
            "lr": MUON_RATIO * lr if muon_lr is None else muon_lr,
            "weight_decay": muon_weight_decay,
        }
        adamw, muon = self._groups()
        try:
            first: torch.optim.Optimizer = torch.optim.AdamW(adamw, fused=True, **of_adamw)
        except RuntimeError:  # no fused kernel where these parameters are
            first = torch.optim.AdamW(adamw, foreach=True, **of_adamw)
        self._parts = [first, torch.optim.Muon(muon, momentum=momentum, nesterov=True, **of_muon)]
        self._share()

    def _groups(self) -> list[list[dict[str, Any]]]:
        """Those of AdamW, and those of Muon."""
        return [[group for group in self.param_groups if group["muon"] is kind] for kind in (False, True)]

    def _share(self) -> None:
        """Let both parts work on the groups and the state of this optimizer."""
        for part, groups in zip(self._parts, self._groups(), strict=True):
            part.param_groups, part.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both parts, with the settings of each group."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def has_muon() -> bool:
    """Whether this torch has Muon; those before 2.9 do not."""
    return hasattr(torch.optim, "Muon")


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """The two-dimensional weights in the lists of layers of a model, but embeddings; each once."""
    layers = [module for one in model.modules() if isinstance(one, nn.ModuleList) for module in one.modules()]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = {id(weight): weight for module in layers for weight in module.parameters(recurse=False)}
    return [weight for key, weight in weights.items() if weight.dim() == 2 and key not in embeddings]
