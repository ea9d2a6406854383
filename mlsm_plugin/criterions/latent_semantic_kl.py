"""The MLSM loss: KL divergence from the sparse code of a masked token (Berend, ACL Findings 2023)."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from mlsm_plugin.criterions.logged_means import BIT, LoggedMeans

LATENT_TARGET_CHOICES = ChoiceEnum(["distribution", "argmax"])


def latent_semantic_kl(logits: Tensor, atoms: Tensor, weights: Tensor) -> Tensor:
    """Summed KL(target || softmax(logits)) over masked tokens, with sparse targets.

    The target of row i puts ``weights[i, j] / sum_j weights[i, j]`` on atom ``atoms[i, j]``; it is
    never made dense. A row without positive weight contributes nothing and gets no gradient.

    Args:
        logits: ``(n, n_atoms)``, any floating dtype.
        atoms: ``(n, m)`` integer, padded with -1; an atom stands at most once in a row.
        weights: ``(n, m)``, not negative; padding is ignored.

    Returns:
        float32 scalar, in nats.

    Raises:
        ValueError: the shapes do not belong together.

    Reference:
        Berend, "Masked Latent Semantic Modeling: an Efficient Pre-training Alternative to Masked
        Language Modeling", Findings of ACL 2023.
    """
    _check_shapes(logits, atoms, weights)
    target, coded = _normalized_targets(atoms, weights)
    logits = logits.float()
    # KL(t || softmax(z)) = sum_j t_j log t_j - sum_j t_j z_j + logsumexp(z), as sum_j t_j = 1
    negative_entropy = torch.special.xlogy(target, target).sum(dim=1)  # (n,)
    expected_logit = (target * logits.gather(1, atoms.clamp(min=0).long())).sum(dim=1)  # (n,)
    divergence = negative_entropy - expected_logit + logits.logsumexp(dim=1)
    return divergence.masked_fill(~coded, 0.0).sum()


def strongest_atom_cross_entropy(logits: Tensor, atoms: Tensor, weights: Tensor) -> Tensor:
    """Summed cross entropy (nats, float32) to the strongest atom of each row; arguments as above."""
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
    """Target probabilities (n, m) in float32, zero at padding, and which rows have any (n,)."""
    positive = weights.float().masked_fill(atoms < 0, 0.0)
    total = positive.sum(dim=1, keepdim=True)
    coded = total > 0
    return positive / total.masked_fill(~coded, 1.0), coded.squeeze(1)


@dataclass
class LatentSemanticKlConfig(FairseqDataclass):
    """Options of the criterion."""

    latent_weight: float = field(default=1.0, metadata={"help": "weight of the latent-semantic loss"})
    mlm_weight: float = field(default=0.0, metadata={"help": "weight of the masked-LM cross entropy"})
    latent_target: LATENT_TARGET_CHOICES = field(  # type: ignore[valid-type]
        default="distribution",
        metadata={"help": "distribution: KL to the whole code; argmax: cross entropy to its strongest atom"},
    )


@register_criterion("latent_semantic_kl", dataclass=LatentSemanticKlConfig)
class LatentSemanticKlCriterion(FairseqCriterion):
    """``latent_weight`` x KL + ``mlm_weight`` x MLM cross entropy, each a mean over its own tokens.

    The KL counts masked tokens that have a code, the cross entropy all masked tokens. The sample
    size is the first number; a batch's cross entropy is brought to it by the ratio of the two, so
    that after fairseq's division both are means. With ``latent_weight`` 0 the loss and its sample
    size are those of ``masked_lm``.
    """

    def __init__(self, cfg: LatentSemanticKlConfig, task: Any) -> None:
        super().__init__(task)
        if cfg.latent_weight < 0 or cfg.mlm_weight < 0 or cfg.latent_weight + cfg.mlm_weight == 0:
            raise ValueError(
                "--latent-weight and --mlm-weight must not be negative, nor both 0; "
                f"got {cfg.latent_weight} and {cfg.mlm_weight}"
            )
        self.latent_weight = cfg.latent_weight
        self.mlm_weight = cfg.mlm_weight
        self.latent_loss = strongest_atom_cross_entropy if str(cfg.latent_target) == "argmax" else latent_semantic_kl

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """Loss summed over tokens, sample size, logging output."""
        masked = sample["target"].ne(self.padding_idx)  # (B, T)
        num_masked = masked.sum()
        token_logits, extra = model(
            **sample["net_input"],
            masked_tokens=masked,
            project_tokens=self.mlm_weight > 0,
            project_atoms=self.latent_weight > 0,
        )
        logging_output = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "num_masked": num_masked}
        # every parameter takes part in every step, as DistributedDataParallel wants it
        loss = extra["unused_parameters"]
        sample_size = num_masked
        if self.latent_weight > 0:
            codes = sample["codes"]
            latent = self.latent_loss(extra["atom_logits"], codes["atoms"], codes["weights"])
            num_nonzeros = codes["weights"].gt(0).sum(dim=1)
            sample_size = num_nonzeros.gt(0).sum()
            loss = loss + self.latent_weight * latent
            logging_output.update(latent_loss=latent.detach(), num_coded=sample_size, num_nonzeros=num_nonzeros.sum())
        if self.mlm_weight > 0:
            mlm = F.cross_entropy(token_logits.float(), sample["target"][masked], reduction="sum")
            scale = self.mlm_weight
            if self.latent_weight > 0:
                scale = scale * sample_size / num_masked.clamp(min=1)
            loss = loss + scale * mlm
            logging_output["mlm_loss"] = mlm.detach()
        logging_output.update(loss=loss.detach(), sample_size=sample_size)
        return loss, sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over the updates' tokens, in bits (base 2) as fairseq does."""
        means = LoggedMeans(logging_outputs)
        masked, coded = means.total("num_masked"), means.total("num_coded")
        means.log("loss", "loss", means.total("sample_size"), unit=BIT)
        if means.has("latent_loss"):
            means.log("kl", "latent_loss", coded, unit=BIT)
            # 2^KL: how many times over the model hedges beyond the target's own spread
            metrics.log_derived("latent_ppl", lambda meters: utils.get_perplexity(meters["kl"].avg))
            means.log("nonzeros", "num_nonzeros", coded)
            means.log("coded", "num_coded", masked)
        if means.has("mlm_loss"):
            means.log("mlm_loss", "mlm_loss", masked, unit=BIT)
            metrics.log_derived("mlm_ppl", lambda meters: utils.get_perplexity(meters["mlm_loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
