"""The MLSM loss: KL divergence from the sparse code of a masked token (Berend, ACL Findings 2023)."""

from dataclasses import dataclass
from typing import Optional

from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.losses.latent_semantic import LATENT_LOSSES, check_weights, latent_semantic_terms
from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput, Sample
from mlsm_plugin.fairseq_plugin.compat.model_parts import project_masked
from mlsm_plugin.fairseq_plugin.compat.training_options import NO_LATENT_HEAD
from mlsm_plugin.fairseq_plugin.criterions.logged_means import BIT, LoggedMeans, SummedCriterion


@dataclass
class LatentSemanticKlConfig(FairseqDataclass):
    """The options of the criterion."""

    latent_weight: float = option(1.0, help="weight of the latent-semantic loss")
    mlm_weight: float = option(0.0, help="weight of the masked-LM cross entropy")
    # fairseq understands typing.Optional, but not `int | None`
    latent_updates: Optional[int] = option(  # noqa: UP045
        None,
        help="the weight of the latent-semantic loss falls linearly and is 0 from this update on; after that, only "
        "masked LM is trained (default: the weight is constant)",
    )
    latent_target: ChoiceEnum(list(LATENT_LOSSES)) = option(  # type: ignore[valid-type]
        "distribution", help="distribution: KL divergence from the code; argmax: cross entropy with its strongest atom"
    )


@register_criterion("latent_semantic_kl", dataclass=LatentSemanticKlConfig)
class LatentSemanticKlCriterion(SummedCriterion):
    """``latent_weight`` x KL + ``mlm_weight`` x MLM cross entropy, each a mean over its tokens.

    The KL is a mean over masked tokens with a code, the cross entropy over all masked tokens. The sample size is the
    first of these two counts. The cross entropy of a batch is multiplied by the ratio of the first to the second, so
    both are means after fairseq's division. With ``latent_weight`` 0, loss and sample size are those of ``masked_lm``.
    With ``latent_updates`` N, the weight in training after ``u`` updates is ``latent_weight`` x max(0, 1 - u / N). In
    validation it is always ``latent_weight``, which keeps the losses comparable. ValueError if a weight is out of
    range, or nothing is left to train after ``latent_updates``.
    """

    def __init__(self, cfg: LatentSemanticKlConfig, task: FairseqTask) -> None:
        super().__init__(task)
        check_weights(cfg.latent_weight, cfg.mlm_weight)
        if cfg.latent_updates is not None and (cfg.latent_updates < 1 or cfg.mlm_weight == 0):
            raise ValueError(
                "--latent-updates must be at least 1, and needs --mlm-weight above 0 for the updates that follow; got "
                f"--latent-updates {cfg.latent_updates} --mlm-weight {cfg.mlm_weight}"
            )
        self._initial_weight = cfg.latent_weight
        self._latent_updates = cfg.latent_updates
        self._num_updates = 0
        self.mlm_weight = cfg.mlm_weight
        self.latent_target = str(cfg.latent_target)

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of updates done; the task calls this before each step."""
        self._num_updates = num_updates

    @property
    def latent_weight(self) -> float:
        """The present weight of the latent-semantic loss."""
        if self._latent_updates is None or not self.training:
            return self._initial_weight
        return self._initial_weight * max(0.0, 1 - self._num_updates / self._latent_updates)

    def forward(
        self, model: BaseFairseqModel, sample: Sample, reduce: bool = True
    ) -> tuple[Tensor, int | Tensor, LoggingOutput]:
        """The loss summed over tokens, the sample size, and the logging output; ValueError without a latent head."""
        latent_weight = self.latent_weight
        targets, number, token_logits, extra = project_masked(
            model, sample, self.padding_idx, project_tokens=self.mlm_weight > 0, project_atoms=latent_weight > 0
        )
        if latent_weight > 0 and "atom_logits" not in extra:
            raise ValueError(NO_LATENT_HEAD)
        terms = latent_semantic_terms(
            targets=targets,
            token_logits=token_logits,
            atom_logits=extra.get("atom_logits"),
            codes=sample.get("codes"),
            latent_weight=latent_weight,
            mlm_weight=self.mlm_weight,
            latent_target=self.latent_target,
            zero=extra.get("zero_with_gradient"),  # for parameters of projections that this step does not compute
            ignore_index=self.padding_idx,
            num_targets=number,
        )
        logging_output = {
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "num_masked": number,
            "loss": terms.loss.detach(),
            "sample_size": terms.sample_size,
        }
        if terms.latent is not None and terms.nonzeros is not None:
            logging_output["latent_loss"] = terms.latent.sum()
            logging_output["num_coded"] = terms.sample_size
            logging_output["num_nonzeros"] = terms.nonzeros.sum()
        if terms.mlm is not None:
            logging_output["mlm_loss"] = terms.mlm.sum()
        return terms.loss, terms.sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[LoggingOutput]) -> None:
        """Log means over the tokens of the updates, in bits as in fairseq; ``kl`` too, which is computed in nats."""
        means = LoggedMeans(logging_outputs)
        masked = means.total("num_masked")
        coded = means.total("num_coded")
        means.log("loss", "loss", means.total("sample_size"), unit=BIT)
        if means.has("latent_loss"):
            means.log("kl", "latent_loss", coded, unit=BIT)
            # 2^KL: the factor by which the model's distribution is more spread out than the target
            metrics.log_derived("latent_ppl", lambda meters: utils.get_perplexity(meters["kl"].avg))
            means.log("nonzeros", "num_nonzeros", coded)
            means.log("coded", "num_coded", masked)
        if means.has("mlm_loss"):
            means.log("mlm_loss", "mlm_loss", masked, unit=BIT)
            metrics.log_derived("mlm_ppl", lambda meters: utils.get_perplexity(meters["mlm_loss"].avg))
