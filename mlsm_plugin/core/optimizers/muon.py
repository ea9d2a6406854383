"""Muon (Jordan et al., 2024) for the matrices of the layers and AdamW for all other weights, as one optimizer.

The momentum of a matrix is orthogonalized as a whole, or in blocks of rows, such as those of an attention head. Blocks
cost at most a fourth. With them, masked LM learns faster in short trainings, but less in long ones
(docs/research/recipe.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from mlsm_plugin.core.machine.devices import has_fast_bf16

MUON_RATIO = 10.0  # default ratio of Muon's learning rate to AdamW's
BLOCK_ROWS = 64  # the usual width of an attention head
UPDATES_IN_BLOCKS = 1200  # blocks learn faster in trainings of up to this many updates
ITERATIONS = 5
ITERATIONS_OF_BLOCKS = 3
# coefficients of the quintic Newton-Schulz iteration (Jordan et al., 2024)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
TINY = 1e-7


def orthogonalized(matrix: Tensor) -> Tensor:
    """Bring the singular values of a matrix ``(m, n)`` close to 1 (Jordan et al., 2024); float32. Zeros stay zeros.

    The matrix is divided by its Frobenius norm, then goes through five Newton-Schulz iterations, in bfloat16 if the
    device is fast in it.
    """
    rows, columns = matrix.shape
    converted = _for_products(matrix)
    wide = converted.T if rows > columns else converted
    wide = wide / wide.norm().clamp(min=TINY)
    for _ in range(ITERATIONS):
        wide = _iterated(wide[None], (wide @ wide.T)[None])[0]
    result = wide.T if rows > columns else wide
    return result.float()


def orthogonalized_in_blocks(matrix: Tensor, block_rows: int = BLOCK_ROWS) -> Tensor:
    """Make the rows of a matrix ``(m, n)`` nearly orthonormal within blocks of ``block_rows`` rows; float32.

    Each block is scaled so that its largest singular value is at most 1 (the scales of AOL, Prach and Lampert, 2022, as
    in Turbo-Muon, Boissin et al., 2025), then goes through three Newton-Schulz iterations, in bfloat16 if the device is
    fast in it. The result is scaled to the Frobenius norm ``sqrt(min(m, n))`` of a matrix with orthonormal rows or
    columns; zeros stay zeros.
    """
    rows, columns = matrix.shape
    size = min(block_rows, rows, columns)
    padded = nn.functional.pad(matrix, (0, 0, 0, -rows % size))
    blocks = _for_products(padded).view(-1, size, columns)
    gram = torch.bmm(blocks, blocks.mT)  # (blocks, size, size)
    scales = gram.abs().sum(dim=2).clamp(min=TINY).rsqrt()
    blocks = blocks * scales[:, :, None]
    gram = gram * scales[:, :, None] * scales[:, None, :]
    for iteration in range(ITERATIONS_OF_BLOCKS):
        if iteration:
            gram = torch.bmm(blocks, blocks.mT)
        blocks = _iterated(blocks, gram)
    result = blocks.reshape(-1, columns)[:rows].float()
    return result * (min(rows, columns) ** 0.5 / result.norm().clamp(min=TINY))


def _for_products(matrix: Tensor) -> Tensor:
    """A matrix in bfloat16 if products are faster in it, else in float32.

    A CPU without bfloat16 instructions takes ten times as long in bfloat16 as in float32.
    """
    return matrix.bfloat16() if has_fast_bf16(matrix.device) else matrix.float()


def _iterated(matrices: Tensor, grams: Tensor) -> Tensor:
    """One Newton-Schulz iteration of matrices ``(b, m, n)`` with their Gram matrices ``(b, m, m)``."""
    linear, cubic, quintic = COEFFICIENTS
    factors = torch.baddbmm(grams, grams, grams, beta=cubic, alpha=quintic)
    return torch.baddbmm(matrices, factors, matrices, beta=linear)


class Muon(torch.optim.Optimizer):
    """Muon; its state has the format of ``torch.optim.Muon``.

    The update of a matrix ``(m, n)`` is scaled by ``sqrt(max(1, m / n))``, as in the original.

    Args:
        params: matrices, or groups of them.
        lr, weight_decay: the decay is decoupled from the gradient.
        momentum: Nesterov momentum.
        block_rows: rows of a block that is orthogonalized; None: orthogonalize the whole matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        block_rows: int | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.block_rows = block_rows

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient; there is no ``closure``."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group)

    def _update(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        mixed = gradient.lerp(average, group["momentum"])
        if self.block_rows is None:
            direction = orthogonalized(mixed)
        else:
            direction = orthogonalized_in_blocks(mixed, self.block_rows)
        rows, columns = matrix.shape
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(direction, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


class MuonAdamW(torch.optim.Optimizer):
    """Muon on the matrices of the layers, and ``torch.optim.AdamW`` on everything else.

    Both work on the groups and the state of this optimizer. A scheduler that multiplies the rate of each group keeps
    their ratio. ValueError if there is no matrix, or a value is out of range.

    Args:
        matrices: the result of :func:`matrices_of_layers`.
        others: all other parameters, as groups of AdamW, each optionally with its own ``weight_decay``.
        lr, betas, eps, weight_decay: of AdamW.
        muon_lr, momentum, muon_weight_decay, block_rows: of :class:`Muon`.
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
        block_rows: int | None = None,
    ) -> None:
        if not matrices:
            raise ValueError("there is no matrix of a layer among the parameters, and Muon only trains those")
        self._parts: list[torch.optim.Optimizer] = []
        super().__init__(
            [*({**group, "muon": False} for group in others), {"params": list(matrices), "muon": True}], {}
        )
        adamw, muon = self._groups()
        try:
            first = torch.optim.AdamW(adamw, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        except RuntimeError:  # no fused kernel where these parameters are
            first = torch.optim.AdamW(adamw, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=True)
        rate = MUON_RATIO * lr if muon_lr is None else muon_lr
        second = Muon(muon, lr=rate, momentum=momentum, weight_decay=muon_weight_decay, block_rows=block_rows)
        self._parts = [first, second]
        self._share()

    def _groups(self) -> list[list[dict[str, Any]]]:
        """The groups of AdamW, and the groups of Muon."""
        return [[group for group in self.param_groups if group["muon"] is kind] for kind in (False, True)]

    def _share(self) -> None:
        """Let both parts work on the groups and the state of this optimizer."""
        for part, groups in zip(self._parts, self._groups(), strict=True):
            part.param_groups = groups
            part.state = self.state

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


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """The two-dimensional weights in the layer lists of a model, except embeddings; each once."""
    layers = [
        module
        for module_list in model.modules()
        if isinstance(module_list, nn.ModuleList)
        for module in module_list.modules()
    ]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = {id(weight): weight for module in layers for weight in module.parameters(recurse=False)}
    return [weight for key, weight in weights.items() if weight.dim() == 2 and key not in embeddings]
