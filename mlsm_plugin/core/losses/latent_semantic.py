"""The MLSM loss: KL divergence from the sparse code of a masked token, with or without MLM; in nats.

Berend, "Masked Latent Semantic Modeling: an Efficient Pre-training Alternative to Masked Language Modeling", Findings
of ACL 2023.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.core.losses.cross_entropy import token_cross_entropy


def latent_semantic_kl(logits: Tensor, atoms: Tensor, weights: Tensor) -> Tensor:
    """KL(target || softmax(logits)) of each masked token, with sparse targets: ``(n,)`` float32, in nats.

    The target of row i gives atom ``atoms[i, j]`` the probability ``weights[i, j] / sum_j weights[i, j]``. It is never
    made dense. A row without positive weights contributes 0 and gets a gradient of 0. ValueError if the shapes do not
    fit together.

    Args:
        logits: ``(n, n_atoms)``, any floating dtype.
        atoms: ``(n, m)`` integer, padded with -1; each atom at most once in a row.
        weights: ``(n, m)``, not negative; padding is ignored.
    """
    _check_shapes(logits, atoms, weights)
    target, coded = _normalized_targets(atoms, weights)
    divergences: Tensor = _SparseKl.apply(logits, atoms.clamp(min=0).long(), target, coded)
    return divergences


class _SparseKl(torch.autograd.Function):
    """Computes the gradient in the forward pass and stores it in the memory of the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, atoms: Tensor, target: Tensor, coded: Tensor) -> Tensor:
        """The divergence of each row, 0 for rows that are not coded."""
        log_probability = logits.log_softmax(dim=1, dtype=torch.float32)
        # KL(t || p) = sum_j t_j log t_j - sum_j t_j log p_j
        negative_entropy = torch.special.xlogy(target, target).sum(dim=1)  # (n,)
        divergence = negative_entropy - (target * log_probability.gather(1, atoms)).sum(dim=1)
        if ctx.needs_input_grad[0]:  # p - t, as the target of a coded row sums to 1
            gradient = log_probability.exp_().scatter_add_(1, atoms, -target)
            ctx.save_for_backward(gradient.masked_fill_(~coded[:, None], 0.0))
            ctx.dtype = logits.dtype
        return divergence.masked_fill(~coded, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * scale[:, None]).to(ctx.dtype), None, None, None


def strongest_atom_cross_entropy(logits: Tensor, atoms: Tensor, weights: Tensor) -> Tensor:
    """The cross entropy with the strongest atom of each row as the target; otherwise as :func:`latent_semantic_kl`."""
    _check_shapes(logits, atoms, weights)
    target, coded = _normalized_targets(atoms, weights)
    if atoms.size(1) == 0:
        return logits.float().sum(dim=1) * 0.0
    strongest = atoms.gather(1, target.argmax(dim=1, keepdim=True)).squeeze(1).long()
    return F.cross_entropy(logits.float(), strongest.masked_fill(~coded, -1), ignore_index=-1, reduction="none")


def _check_shapes(logits: Tensor, atoms: Tensor, weights: Tensor) -> None:
    if logits.dim() != 2 or atoms.dim() != 2 or atoms.shape != weights.shape or len(atoms) != len(logits):
        raise ValueError(
            "expected logits (n, n_atoms), atoms (n, m) and weights (n, m); "
            f"got {tuple(logits.shape)}, {tuple(atoms.shape)} and {tuple(weights.shape)}"
        )


def _normalized_targets(atoms: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Target probabilities (n, m) in float32, 0 for padding; and whether each row has positive weights, (n,) bool."""
    positive = weights.float().masked_fill(atoms < 0, 0.0)
    total = positive.sum(dim=1, keepdim=True)
    coded = total > 0
    return positive / total.masked_fill(~coded, 1.0), coded.squeeze(1)


LATENT_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "distribution": latent_semantic_kl,
    "argmax": strongest_atom_cross_entropy,
}


class LatentSemanticTerms(NamedTuple):
    """The loss of a batch of n masked tokens, and figures to log; only the loss has a gradient.

    Figures of a loss with weight 0 are None.
    """

    loss: Tensor  # latent_weight x KL + mlm_weight x MLM, summed, float32 scalar; divide it by sample_size
    sample_size: int | Tensor  # masked tokens that have a code; all masked tokens if latent_weight is 0
    latent: Tensor | None  # (n,) the latent loss in nats
    nonzeros: Tensor | None  # (n,) number of atoms in the code
    mlm: Tensor | None  # (n,) the cross entropy in nats


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
    codes: dict[str, Any] | None,
    latent_weight: float,
    mlm_weight: float,
    latent_target: str = "distribution",
    zero: Tensor | None = None,
    ignore_index: int = -100,
    num_targets: Tensor | int | None = None,
) -> LatentSemanticTerms:
    """``latent_weight`` x KL + ``mlm_weight`` x MLM cross entropy; each is a mean after division by the sample size.

    The KL is a mean over masked tokens with a code, the cross entropy over all masked tokens. The sample size is the
    first of these two counts, and the cross entropy is multiplied by the ratio of the first to the second.

    Args:
        targets: ``(n,)`` ids of the masked tokens.
        token_logits: ``(n, V)``; may be None if ``mlm_weight`` is 0.
        atom_logits: ``(n, n_atoms)``; may be None, like ``codes``, if ``latent_weight`` is 0.
        codes: ``atoms`` ``(n, m)`` and ``weights`` ``(n, m)``, see :func:`latent_semantic_kl`; optionally ``number``,
            the number of rows that have an atom.
        latent_weight, mlm_weight: not negative, not both 0.
        latent_target: a key of :data:`LATENT_LOSSES`.
        zero: a zero to start the sum with, which gives idle parameters a gradient of zeros.
        ignore_index: target of padding rows; these come last and have no codes.
        num_targets: number of other rows, if known.
    """
    num_masked = sample_size = targets.ne(ignore_index).sum() if num_targets is None else num_targets
    loss = torch.zeros((), device=targets.device) if zero is None else zero
    latent = nonzeros = mlm = None
    if latent_weight > 0:
        assert codes is not None
        assert atom_logits is not None
        further = (0, 0, 0, len(targets) - len(codes["atoms"]))
        atoms = F.pad(codes["atoms"], further, value=-1)
        weights = F.pad(codes["weights"], further)
        latent = LATENT_LOSSES[latent_target](atom_logits, atoms, weights)
        nonzeros = weights.gt(0).sum(dim=1)
        sample_size = nonzeros.gt(0).sum() if codes.get("number") is None else codes["number"]
        loss = loss + latent_weight * latent.sum()
        latent = latent.detach()
    if mlm_weight > 0:
        assert token_logits is not None
        mlm = token_cross_entropy(token_logits, targets, ignore_index=ignore_index)
        some = num_masked.clamp(min=1) if isinstance(num_masked, Tensor) else max(num_masked, 1)
        scale = mlm_weight if nonzeros is None else mlm_weight * sample_size / some
        loss = loss + scale * mlm.sum()
        mlm = mlm.detach()
    return LatentSemanticTerms(loss, sample_size, latent, nonzeros, mlm)
