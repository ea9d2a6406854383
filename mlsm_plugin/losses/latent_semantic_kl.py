"""The MLSM loss: KL divergence from the sparse code of a masked token (Berend, ACL Findings 2023)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def latent_semantic_kl(logits: Tensor, atoms: Tensor, weights: Tensor) -> Tensor:
    """The sum of KL(target || softmax(logits)) over masked tokens, with sparse targets.

    The target of row i gives atom ``atoms[i, j]`` the probability ``weights[i, j] / sum_j weights[i, j]``, and is never
    made dense. A row without positive weights contributes 0 and gets a gradient of 0.

    Args:
        logits: ``(n, n_atoms)``, any floating dtype.
        atoms: ``(n, m)`` integer, padded with -1; an atom occurs at most once in a row.
        weights: ``(n, m)``, not negative; padding is ignored.

    Returns:
        float32 scalar, in nats.

    Raises:
        ValueError: the shapes do not fit together.

    Reference:
        Berend, "Masked Latent Semantic Modeling: an Efficient Pre-training Alternative to Masked
        Language Modeling", Findings of ACL 2023.
    """
    _check_shapes(logits, atoms, weights)
    target, coded = _normalized_targets(atoms, weights)
    divergence: Tensor = _SparseKl.apply(logits, atoms.clamp(min=0).long(), target, coded)
    return divergence


class _SparseKl(torch.autograd.Function):
    """Computes the gradient in the forward pass, in the memory of the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, atoms: Tensor, target: Tensor, coded: Tensor) -> Tensor:
        """The sum of the divergences of the rows that are coded."""
        log_probability = logits.log_softmax(dim=1, dtype=torch.float32)
        # KL(t || p) = sum_j t_j log t_j - sum_j t_j log p_j
        negative_entropy = torch.special.xlogy(target, target).sum(dim=1)  # (n,)
        divergence = negative_entropy - (target * log_probability.gather(1, atoms)).sum(dim=1)
        if ctx.needs_input_grad[0]:  # p - t, as the target of a coded row sums to 1
            gradient = log_probability.exp_().scatter_add_(1, atoms, -target)
            ctx.save_for_backward(gradient.masked_fill_(~coded[:, None], 0.0))
            ctx.dtype = logits.dtype
        return divergence.masked_fill(~coded, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        """Scale the gradient that the forward pass computed."""
        (gradient,) = ctx.saved_tensors
        return (gradient * scale).to(ctx.dtype), None, None, None


def strongest_atom_cross_entropy(logits: Tensor, atoms: Tensor, weights: Tensor) -> Tensor:
    """The summed cross entropy with the strongest atom of each row as the target: float32 scalar, in nats.

    Args and errors are those of :func:`latent_semantic_kl`.
    """
    _check_shapes(logits, atoms, weights)
    target, coded = _normalized_targets(atoms, weights)
    if atoms.size(1) == 0:
        return logits.float().sum() * 0.0
    strongest = atoms.gather(1, target.argmax(dim=1, keepdim=True)).squeeze(1).long()
    return F.cross_entropy(logits.float(), strongest.masked_fill(~coded, -1), ignore_index=-1, reduction="sum")


def _check_shapes(logits: Tensor, atoms: Tensor, weights: Tensor) -> None:
    if logits.dim() != 2 or atoms.dim() != 2 or atoms.shape != weights.shape or len(atoms) != len(logits):
        raise ValueError(
            "expected logits (n, n_atoms), atoms (n, m) and weights (n, m); "
            f"got {tuple(logits.shape)}, {tuple(atoms.shape)} and {tuple(weights.shape)}"
        )


def _normalized_targets(atoms: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Target probabilities (n, m) in float32, 0 for padding; and which rows have positive weights, (n,) bool."""
    positive = weights.float().masked_fill(atoms < 0, 0.0)
    total = positive.sum(dim=1, keepdim=True)
    coded = total > 0
    return positive / total.masked_fill(~coded, 1.0), coded.squeeze(1)
