"""Regression of another model's hidden states, as in knowledge distillation by FitNets (Romero et al., ICLR 2015)."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

FEWEST_STATES = 2
FEW_STATES = 200  # fewer give a poor mean and deviation
ENOUGH_STATES = 10_000  # for mean and deviation
CONSTANT = 1e-6  # a deviation that is less than this share of the largest is rounding


class StateRegression(nn.Module):
    """A linear layer that predicts standardized hidden states, and their mean squared error.

    Each dimension is shifted and scaled to mean 0 and variance 1, so that an error of 1 is that of a prediction that
    does not depend on the input. Before :meth:`standardize` is called, states stay as they are. A token whose state is
    zero has none, and no error.

    Args:
        width: width of the input.
        dim: width of the hidden states.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, dim)
        nn.init.normal_(self.projection.weight, std=0.02)
        nn.init.zeros_(self.projection.bias)
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("deviation", torch.ones(dim))

    @property
    def is_standardized(self) -> bool:
        """Whether :meth:`standardize` was called, here or before the weights were saved."""
        return bool((self.mean != 0).any()) or bool((self.deviation != 1).any())

    def standardize(self, samples: Iterable[Tensor]) -> None:
        """Take mean and deviation from hidden states, ``(n, dim)`` each, of which 10,000 are enough.

        ValueError if there are fewer than two, or one is not finite.
        """
        states = torch.zeros(0, len(self.mean), dtype=torch.float64)
        for sample in samples:
            states = torch.cat([states, sample[sample.any(dim=1)].double().cpu()])
            if len(states) >= ENOUGH_STATES:
                break
        if len(states) < FEWEST_STATES:
            raise ValueError(f"the sample of the text has {len(states)} tokens with a hidden state; pass more text")
        if len(states) < FEW_STATES:
            logger.warning("hidden states are standardized by those of only %d tokens; pass more text", len(states))
        if not bool(states.isfinite().all()):
            raise ValueError("the auxiliary model computes hidden states that are not finite; use another model")
        deviation = states.std(dim=0)
        self.mean.copy_(states.mean(dim=0))
        self.deviation.copy_(torch.where(deviation > CONSTANT * deviation.max(), deviation, 1.0))

    def forward(self, inputs: Tensor, states: Tensor) -> Tensor:
        """The mean squared error ``(n,)`` float32 of each prediction.

        ``inputs`` is ``(n, width)``, ``states`` is ``(n, dim)`` and has no gradient.
        """
        targets = (states.float() - self.mean.float()) / self.deviation.float()
        predictions: Tensor = self.projection(inputs.to(self.projection.weight.dtype))
        errors = (predictions.float() - targets).square().mean(dim=1)
        return errors.where(states.any(dim=1), 0.0)
