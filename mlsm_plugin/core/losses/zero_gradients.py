"""Give a gradient of zeros to parameters that take no part in a step."""

from collections.abc import Iterable

import torch
from torch import Tensor


def zero_with_gradient(parameters: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """A zero that, added to a loss, gives each of ``parameters`` a gradient of zeros.

    torch's DistributedDataParallel requires a gradient for every parameter in every step. The scalar is in float32, or
    the widest floating dtype of the parameters, on their device, or on ``device`` if there are none. Parameters that do
    not require a gradient are left out.
    """
    # one element of each, as a sum over all elements could overflow in half precision
    parts = (parameter.view(-1)[0] * 0.0 for parameter in parameters if parameter.requires_grad)
    return sum(parts, start=torch.zeros((), device=device))
