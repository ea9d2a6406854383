"""The loss of MLSM with and without MLM, and what is logged with it, for a batch of masked tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.losses.latent_semantic_kl import latent_semantic_kl, strongest_atom_cross_entropy

LATENT_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "distribution": latent_semantic_kl,
    "argmax": strongest_atom_cross_entropy,
}


class LatentSemanticTerms(NamedTuple):
    """Sums over the masked tokens of a batch; only the loss has a gradient.

    Attributes:
        loss: ``latent_weight`` x KL + ``mlm_weight`` x MLM, float32 scalar; to be divided by ``sample_size``.
        sample_size: masked tokens that have a code; all masked tokens if ``latent_weight`` is 0.
        num_masked: masked tokens.
        latent, num_coded, num_nonzeros: the latent loss in nats, the masked tokens that have a code, and the atoms in
            their codes; None if ``latent_weight`` is 0.
        mlm: the cross entropy in nats; None if ``mlm_weight`` is 0.
    """

    loss: Tensor
    sample_size: Any
    num_masked: Any
    latent: Tensor | None
    num_coded: Tensor | None
    num_nonzeros: Tensor | None
    mlm: Tensor | None


def check_weights(latent_weight: float, mlm_weight: float) -> None:
    """Raise ValueError if a weight is negative, or both are 0."""
    if latent_weight < 0 or mlm_weight < 0 or latent_weight + mlm_weight == 0:
        raise ValueError(
            "--latent-weight and --mlm-weight must not be negative, and not both 0; "
            f"got {latent_weight} and {mlm_weight}"
        )


def latent_semantic_terms(
    *,
    targets: Tensor,
    token_logits: Tensor | None,
    atom_logits: Tensor | None,
    codes: dict[str, Tensor] | None,
    latent_weight: float,
    mlm_weight: float,
    latent_target: str = "distribution",
    zero: Tensor | None = None,
) -> LatentSemanticTerms:
    """``latent_weight`` x KL + ``mlm_weight`` x MLM cross entropy, each a mean over its own tokens after division.

    The KL counts masked tokens that have a code, the cross entropy all masked tokens. The sample size is the first of
    the two counts, and the cross entropy is multiplied by the ratio of the first to the second.

    Args:
        targets: ``(n,)`` ids of the masked tokens.
        token_logits: ``(n, V)``; may be None if ``mlm_weight`` is 0.
        atom_logits: ``(n, n_atoms)``; may be None, as ``codes``, if ``latent_weight`` is 0.
        codes: ``atoms`` ``(n, m)`` and ``weights`` ``(n, m)``, see :func:`latent_semantic_kl`.
        latent_weight, mlm_weight: not negative, not both 0.
        latent_target: a key of :data:`LATENT_LOSSES`.
        zero: a zero to begin with, which gives idle parameters a gradient of zeros.
    """
    num_masked = targets.new_tensor(len(targets))
    loss = torch.zeros((), device=targets.device) if zero is None else zero
    sample_size = num_masked
    latent = num_coded = num_nonzeros = mlm = None
    if latent_weight > 0:
        assert codes is not None
        assert atom_logits is not None
        latent = LATENT_LOSSES[latent_target](atom_logits, codes["atoms"], codes["weights"])
        nonzeros = codes["weights"].gt(0).sum(dim=1)
        sample_size = num_coded = nonzeros.gt(0).sum()
        num_nonzeros = nonzeros.sum()
        loss = loss + latent_weight * latent
    if mlm_weight > 0:
        assert token_logits is not None
        mlm = F.cross_entropy(token_logits.float(), targets, reduction="sum")
        scale = mlm_weight if num_coded is None else mlm_weight * num_coded / num_masked.clamp(min=1)
        loss = loss + scale * mlm
    return LatentSemanticTerms(
        loss=loss,
        sample_size=sample_size,
        num_masked=num_masked,
        latent=None if latent is None else latent.detach(),
        num_coded=num_coded,
        num_nonzeros=num_nonzeros,
        mlm=None if mlm is None else mlm.detach(),
    )
