"""The TACO loss, and the draw of the tokens that it compares: positives nearby, negatives in other sequences.

Fu et al., "Contextual Representation Learning beyond Masked Language Modeling", ACL 2022.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NONE = -1  # in the place of an index
SHORTEST = 1e-8  # vectors shorter than this count as zero, as their gradient would not be finite
ANCHORS = ("all", "unmasked", "masked")


@dataclass(frozen=True)
class Contrast:
    """Which tokens of a batch are compared with each other; ValueError if a value is out of range."""

    positive_window: int = 5  # W; a positive is less than W tokens from its anchor
    negatives: int = 50  # K; number of tokens of other sequences to compare each anchor with
    anchors: str = "all"  # tokens that are anchors: all, masked or unmasked

    def __post_init__(self) -> None:
        for name in ("positive_window", "negatives"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name)}")
        if self.positive_window < 2:
            raise ValueError(f"positive_window must be at least 2, got {self.positive_window}")
        if self.negatives < 1:
            raise ValueError(f"negatives must be at least 1, got {self.negatives}")
        if self.anchors not in ANCHORS:
            raise ValueError(f"anchors must be all, masked or unmasked, got {self.anchors}")

    def anchors_in(self, valid: Tensor, masked: Tensor) -> Tensor:
        """The anchors ``(B, T)`` among the ``valid`` tokens; bool, like both arguments."""
        return {"all": valid, "masked": valid & masked, "unmasked": valid & ~masked}[self.anchors]


def generator_of(*numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator that depends only on ``numbers``, whole numbers from 0 on."""
    (state,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


def check_contrast_weight(weight: float, temperature: float) -> None:
    """Raise ValueError if the weight of the loss or the divisor of the cosines is out of range."""
    if weight < 0:
        raise ValueError(f"contrastive_weight must not be negative, got {weight}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def sample_pairs(
    valid: Tensor,
    *,
    window: int,
    num_negatives: int,
    generator: torch.Generator,
    pool_size: int | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Draw a positive and negatives for every valid token of a batch.

    The positive of token t is drawn uniformly from the valid tokens t' of its sequence with ``0 < |t - t'| < window``;
    if there are none, from all other valid tokens of the sequence. The negatives are drawn uniformly, with replacement,
    from the valid tokens of the other sequences (Fu et al., ACL 2022). ValueError if ``window`` or ``num_negatives`` is
    too small, or ``valid`` is not a bool matrix.

    Args:
        valid: ``(B, T)`` bool, False for padding, BOS and EOS.
        window: limit of the distance, at least 2.
        num_negatives: K, at least 1.
        generator: source of randomness, on the device of ``valid``.
        pool_size: number of valid tokens in a pool to draw the negatives from, which contains the batch's valid tokens
            in one piece; None: draw from the batch.
        first: index in the pool of the first valid token of the batch.

    Returns:
        positive ``(B, T)`` and negative ``(B, T, K)``: int64 indices into the flattened batch x length, or into the
        pool. A token gets -1 if it is not valid, or if there is nothing to draw from.
    """
    if valid.dim() != 2 or valid.dtype != torch.bool:
        raise ValueError(f"expected valid (B, T) bool, got {tuple(valid.shape)} {valid.dtype}")
    if window < 2 or num_negatives < 1:
        raise ValueError(f"expected window >= 2 and num_negatives >= 1, got {window} and {num_negatives}")
    flat = valid.flatten().nonzero().squeeze(1)  # (N,), the valid tokens, sequence by sequence
    counts = valid.sum(dim=1)
    starts = counts.cumsum(0) - counts + first  # index of each sequence in the pool
    nearby = _draw_nearby(valid, window, generator)
    positive = torch.where(nearby == NONE, NONE, nearby + starts[:, None])
    size = len(flat) if pool_size is None else pool_size
    negative = _draw_others(valid, starts, counts, size, num_negatives, generator)
    if pool_size is not None or len(flat) == 0:
        return positive, negative
    return torch.where(positive == NONE, NONE, flat[positive]), torch.where(negative == NONE, NONE, flat[negative])


def _draw(number: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw integers of ``shape``, uniform in [0, number); results are only valid where ``number`` is positive."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=number.device)
    return (uniform * number).long()


def _draw_nearby(valid: Tensor, window: int, generator: torch.Generator) -> Tensor:
    """Draw the positive of each token, (B, T), as an index into the valid tokens of its sequence; -1 for none."""
    before = F.pad(valid.cumsum(dim=1), (1, 0))  # (B, T + 1): number of valid tokens before each
    position = torch.arange(valid.size(1), device=valid.device)
    lowest = before[:, (position - window + 1).clamp(min=0)]
    number = before[:, (position + window).clamp(max=valid.size(1))] - lowest - 1  # without the token itself
    lonely = number < 1
    lowest = lowest.masked_fill(lonely, 0)
    number = torch.where(lonely, before[:, -1:] - 1, number)
    drawn = lowest + _draw(number, number.shape, generator)
    drawn += drawn >= before[:, :-1]  # skips the token itself
    return drawn.masked_fill(~valid | (number < 1), NONE)


def _draw_others(
    valid: Tensor, starts: Tensor, counts: Tensor, pool_size: int, num_negatives: int, generator: torch.Generator
) -> Tensor:
    """Draw the negatives of each token as indices into the pool, where sequences begin at ``starts``; -1 for none."""
    starts = starts[:, None, None]
    counts = counts[:, None, None]
    drawn = _draw(pool_size - counts, torch.Size((*valid.shape, num_negatives)), generator)
    drawn += counts * (drawn >= starts)  # skips the token's own sequence
    return drawn.masked_fill_(~valid[:, :, None] | (counts == pool_size), NONE)


class ContrastiveTerms(NamedTuple):
    """The loss, and figures to log: ``(a,)`` a value for each anchor, without gradient."""

    loss: Tensor  # InfoNCE in nats, summed, float32 scalar with gradient
    losses: Tensor  # loss of each anchor
    correct: Tensor  # whether its positive is nearer than all negatives, bool
    positive_cosine: Tensor  # cosine of an anchor and its positive
    negative_cosine: Tensor  # mean cosine of an anchor and its negatives


def contrastive_terms(
    semantics: Tensor,
    anchors: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    temperature: float,
    keys: Tensor | None = None,
) -> ContrastiveTerms:
    """InfoNCE of unit vectors, summed over the anchors; its memory does not grow with K.

    For an anchor a, a positive p and negatives n_1, ..., n_K, all divided by their L2 norms, the loss is
    ``-log(exp(a p / temperature) / (exp(a p / temperature) + sum_k exp(a n_k / temperature)))``. Only a has a gradient.
    ValueError if the shapes do not fit together.

    Args:
        semantics: ``(B, T, d)``, any floating dtype. A vector of zeros has cosine 0 with all others, and gradient 0.
        anchors: ``(B, T)`` bool.
        positive, negative: ``(B, T)`` and ``(B, T, K)``, as :func:`sample_pairs` makes them. A token without a positive
            or without negatives is not an anchor.
        temperature: a positive number.
        keys: ``(m, d)`` unit vectors without gradient, which ``positive`` and ``negative`` index; None: ``semantics``,
            divided by their norms.
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
    """The anchors ``(B, T)`` that have a positive and negatives, bool; arguments as for :func:`contrastive_terms`."""
    return anchors & (positive != NONE) & (negative[:, :, 0] != NONE)


def unit_rows(vectors: Tensor) -> Tensor:
    """Divide ``vectors`` (n, d) by their L2 norms, at least in float32; vectors shorter than 1e-8 become zero."""
    vectors = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
    return vectors / _norms(vectors)


def _norms(vectors: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return norms.masked_fill(norms < SHORTEST, torch.inf)


def _cosines(anchor: Tensor, keys: Tensor, candidates: Tensor) -> Tensor:
    """The products of each anchor (a, d) with its keys, ``(a, 1 + K)``, without gathering the keys in memory."""
    with torch.enable_grad():  # the products are the derivatives of weighted sums of the keys by the weights
        weights = keys.new_zeros(candidates.shape, requires_grad=True)
        sums = F.embedding_bag(candidates, keys, per_sample_weights=weights, mode="sum")
        return torch.autograd.grad(sums, weights, anchor)[0]


class _InfoNce(torch.autograd.Function):
    """Computes the gradient in the forward pass, without ever making an (n, K, d) tensor."""

    @staticmethod
    def forward(
        ctx: Any, semantics: Tensor, chosen: Tensor, candidates: Tensor, keys: Tensor | None, temperature: float
    ) -> tuple[Tensor, ...]:
        """From semantics (n, d), chosen (a,), candidates (a, 1 + K) with positives first, and keys (m, d)."""
        units = unit_rows(semantics)
        keys = units if keys is None else keys
        gradient = torch.zeros_like(units) if ctx.needs_input_grad[0] else None
        anchor = units[chosen]  # (a, d)
        cosine = _cosines(anchor, keys, candidates)  # (a, 1 + K)
        logits = (cosine - cosine[:, :1]) / temperature
        losses = logits.logsumexp(dim=1)  # as the positive's logit is 0
        correct = cosine[:, 0] > cosine[:, 1:].amax(dim=1)
        of_anchors = losses, correct, cosine[:, 0].clone(), cosine[:, 1:].mean(dim=1)
        if gradient is not None:
            probability = (logits - losses[:, None]).exp()
            probability[:, 0] -= 1
            # gradient of the unit vectors
            pull = F.embedding_bag(candidates, keys, per_sample_weights=probability, mode="sum") / temperature
            gradient[chosen] = pull - (pull * anchor).sum(dim=1, keepdim=True) * anchor
            gradient /= _norms(semantics.detach().to(gradient.dtype))  # 0 for vectors that count as zero
            ctx.save_for_backward(gradient)
        ctx.dtype = semantics.dtype
        ctx.mark_non_differentiable(*of_anchors)
        return losses.double().sum().to(units.dtype), *of_anchors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(ctx.dtype), None, None, None, None
