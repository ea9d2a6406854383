"""Cross entropy that never holds all logits in float32, and the distillation loss; both in nats."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ENTRIES = 1 << 19  # logits in float32 at once: 2 MB, which fit into the caches of a CPU
CHUNK_ENTRIES_GPU = 1 << 24


def token_cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The cross entropy of each token, ``(n,)`` float32, 0 for targets that are ``ignore_index``.

    Computed in float32, a few rows at a time; the gradient has the dtype of the logits and may take their memory.

    Args:
        logits: ``(n, V)``, any floating dtype; nothing else may need their values for its gradient.
        targets: ``(n,)`` ids.
        ignore_index: an id that does not count.
    """
    losses: Tensor = _CrossEntropy.apply(logits, targets, ignore_index)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradient in the forward pass, to the bit as ``F.cross_entropy`` does, with fewer passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        needs_gradient = ctx.needs_input_grad[0]
        losses = logits.new_empty(len(logits), dtype=dtype)
        gradient = torch.empty_like(logits) if needs_gradient else None
        is_target = targets != ignore_index
        columns = targets.where(is_target, 0)[:, None]
        signs = -is_target[:, None].to(dtype)  # -1, or 0 for a row that does not count
        entries = CHUNK_ENTRIES_GPU if logits.is_cuda else CHUNK_ENTRIES
        rows = max(1, entries // max(1, logits.size(1)))
        # the derivatives of the losses of a chunk by its log-probabilities: -1 for each target, and 0 elsewhere
        outer = logits.new_zeros(min(rows, len(logits)), logits.size(1), dtype=dtype)
        for start in range(0, len(logits), rows):
            chunk = slice(start, start + rows)
            part = logits[chunk].detach().to(dtype).requires_grad_(needs_gradient)
            with torch.enable_grad():
                log_probabilities = part.log_softmax(dim=1)
            losses[chunk] = -log_probabilities.detach().gather(1, columns[chunk]).squeeze(1)
            if gradient is not None:
                of_chunk = outer[: len(part)].scatter_(1, columns[chunk], signs[chunk])
                gradient[chunk] = torch.autograd.grad(log_probabilities, part, of_chunk)[0]
                of_chunk.scatter_(1, columns[chunk], 0.0)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses.where(is_target, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        if len(scale) > 1 and scale.stride(0) == 0:  # of a sum: one number for all rows, which is faster
            return gradient * scale[0], None, None
        return torch.mul(gradient, scale[:, None], out=torch.empty_like(gradient)), None, None


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless the temperature is positive."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def distillation_kl(logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 x KL(softmax(teacher / T) || softmax(student / T)) of each token, ``(n,)`` float32, in nats.

    A student learns a teacher's distributions over the vocabulary (Hinton et al., 2015). With the factor T^2, the
    gradients hardly depend on the temperature T. Both logits are ``(n, V)``, any floating dtype; the teacher's logits
    get no gradient. ValueError if their shapes differ, or the temperature is not positive.
    """
    check_temperature(temperature)
    if logits.shape != teacher_logits.shape:
        raise ValueError(f"the student's logits are {tuple(logits.shape)}, the teacher's {tuple(teacher_logits.shape)}")
    with torch.autocast(logits.device.type, enabled=False):
        student = (logits.float() / temperature).log_softmax(dim=1)
        teacher = (teacher_logits.detach().float() / temperature).log_softmax(dim=1)
        return temperature**2 * F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
