"""The TACO loss: nearby tokens have similar global semantics (Fu et al., ACL 2022)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.losses.token_pairs import NONE

# Vectors shorter than this count as zero, as their gradient would not be finite.
SHORTEST = 1e-8


class ContrastiveTerms(NamedTuple):
    """Sums over the anchors, float32 scalars; only the loss has a gradient.

    Attributes:
        loss: InfoNCE, in nats.
        num_correct: number of anchors whose positive is nearer than all negatives.
        positive_cosine: cosine of an anchor and its positive.
        negative_cosine: mean cosine of an anchor and its negatives.
    """

    loss: Tensor
    num_correct: Tensor
    positive_cosine: Tensor
    negative_cosine: Tensor


def token_contrastive_loss(
    semantics: Tensor, anchors: Tensor, positive: Tensor, negative: Tensor, *, temperature: float
) -> Tensor:
    """InfoNCE of unit vectors, summed over the anchors; its memory does not grow with K.

    For an anchor a, a positive p and negatives n_1, ..., n_K, all divided by their L2 norms, the loss is
    ``-log(exp(a p / temperature) / (exp(a p / temperature) + sum_k exp(a n_k / temperature)))``. Only a has a gradient.

    Args:
        semantics: ``(B, T, d)``, any floating dtype. A vector of zeros has cosine 0 with all others, and gradient 0.
        anchors: ``(B, T)`` bool.
        positive, negative: ``(B, T)`` and ``(B, T, K)``, as :func:`sample_pairs` makes them. A token without a positive
            or without negatives is not an anchor.
        temperature: a positive number.

    Returns:
        float32 scalar (float64 for float64 semantics), in nats.

    Raises:
        ValueError: the shapes do not fit together.

    Reference:
        Fu et al., "Contextual Representation Learning beyond Masked Language Modeling", ACL 2022.
    """
    return contrastive_terms(semantics, anchors, positive, negative, temperature=temperature).loss


def contrastive_terms(
    semantics: Tensor,
    anchors: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    temperature: float,
    keys: Tensor | None = None,
) -> ContrastiveTerms:
    """Compute :func:`token_contrastive_loss`, and what is logged with it.

    Args:
        keys: ``(m, d)`` unit vectors, without gradient, that ``positive`` and ``negative`` index; None: those of
            ``semantics``.
    """
    shape = semantics.shape[:2]
    if semantics.dim() != 3 or not shape == anchors.shape == positive.shape == negative.shape[:2]:
        raise ValueError(
            "expected semantics (B, T, d), anchors (B, T), positive (B, T) and negative (B, T, K); got "
            f"{tuple(semantics.shape)}, {tuple(anchors.shape)}, {tuple(positive.shape)} and {tuple(negative.shape)}"
        )
    chosen = usable_anchors(anchors, positive, negative).flatten().nonzero().squeeze(1)
    candidates = torch.cat([positive.flatten()[chosen, None], negative.flatten(0, 1)[chosen]], dim=1)
    with torch.autocast(semantics.device.type, enabled=False):  # --amp would round the products
        return ContrastiveTerms(*_InfoNce.apply(semantics.flatten(0, 1), chosen, candidates, keys, temperature))


def usable_anchors(anchors: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """The anchors ``(B, T)`` that have a positive and negatives, bool; arguments as of :func:`contrastive_terms`."""
    return anchors & (positive != NONE) & (negative[:, :, 0] != NONE)


def unit_rows(vectors: Tensor) -> Tensor:
    """Divide ``vectors`` (n, d) by their L2 norms, at least in float32; vectors shorter than 1e-8 become zero."""
    vectors = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
    return vectors / _norms(vectors)


def _norms(vectors: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return norms.masked_fill(norms < SHORTEST, torch.inf)


def _cosines(anchor: Tensor, keys: Tensor, candidates: Tensor) -> Tensor:
    """The products of each anchor (a, d) with its keys, ``(a, 1 + K)``.

    They are the derivatives of weighted sums of the keys by the weights, which torch computes without gathering the
    keys in memory.
    """
    with torch.enable_grad():
        weights = keys.new_zeros(candidates.shape, requires_grad=True)
        sums = F.embedding_bag(candidates, keys, per_sample_weights=weights, mode="sum")
        return torch.autograd.grad(sums, weights, anchor)[0]


class _InfoNce(torch.autograd.Function):
    """Computes the gradient in the forward pass; no (n, K, d) tensor is ever made."""

    @staticmethod
    def forward(
        ctx: Any,
        semantics: Tensor,
        chosen: Tensor,
        candidates: Tensor,
        keys: Tensor | None,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """The terms of semantics (n, d), chosen (a,), candidates (a, 1 + K) with positives first, and keys (m, d)."""
        own = unit_rows(semantics)
        keys = own if keys is None else keys
        gradient = torch.zeros_like(own) if ctx.needs_input_grad[0] else None
        anchor = own[chosen]  # (a, d)
        cosine = _cosines(anchor, keys, candidates)  # (a, 1 + K)
        logits = (cosine - cosine[:, :1]) / temperature
        normalizer = logits.logsumexp(dim=1)  # equals the loss, as the positive's logit is 0
        sums = (
            normalizer.double().sum(),
            (cosine[:, 0] > cosine[:, 1:].amax(dim=1)).double().sum(),
            cosine[:, 0].double().sum(),
            cosine[:, 1:].mean(dim=1).double().sum(),
        )
        if gradient is not None:
            probability = (logits - normalizer[:, None]).exp()
            probability[:, 0] -= 1
            # gradient of the unit vectors
            pull = F.embedding_bag(candidates, keys, per_sample_weights=probability, mode="sum") / temperature
            gradient[chosen] = pull - (pull * anchor).sum(dim=1, keepdim=True) * anchor
        if gradient is not None:
            gradient /= _norms(semantics.detach().to(gradient.dtype))  # 0 for vectors that count as zero
            ctx.save_for_backward(gradient)
        ctx.dtype = semantics.dtype
        terms = tuple(term.to(own.dtype) for term in sums)
        ctx.mark_non_differentiable(*terms[1:])
        return terms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradient that the forward pass computed."""
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(ctx.dtype), None, None, None, None
