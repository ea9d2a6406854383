"""Masked LM with regression of an auxiliary model's hidden states of masked tokens (Romero et al., 2015)."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.losses.cross_entropy import token_cross_entropy
from mlsm_plugin.core.losses.state_regression import StateRegression
from mlsm_plugin.fairseq_plugin.compat.batches import LoggingOutput, Sample
from mlsm_plugin.fairseq_plugin.compat.model_parts import project_masked
from mlsm_plugin.fairseq_plugin.criterions.logged_means import BIT, LoggedMeans, SummedCriterion

logger = logging.getLogger(__name__)


@dataclass
class StateRegressionConfig(FairseqDataclass):
    """The options of the criterion."""

    regression_weight: float = option(
        1.0, help="weight of the mean squared error of the hidden states, which is 1 for predicting their mean"
    )


@register_criterion("state_regression", dataclass=StateRegressionConfig)
class StateRegressionCriterion(SummedCriterion):
    """Masked-LM cross entropy + ``regression_weight`` x mean squared error of hidden states, over all masked tokens.

    ``state_loss`` in the log is the mean over the tokens that have a hidden state.

    The layer that predicts the states belongs to the criterion: checkpoints have it as ``criterion``, and the model
    stays a masked LM. ValueError if the task has no hidden states, or the weight is not positive.
    """

    def __init__(self, cfg: StateRegressionConfig, task: FairseqTask) -> None:
        super().__init__(task)
        if not hasattr(task, "new_regression"):
            raise ValueError("--criterion state_regression needs --task state_regression, which has the hidden states")
        if not 0 < cfg.regression_weight < math.inf:
            raise ValueError(f"--regression-weight must be positive and finite, got {cfg.regression_weight}")
        self.regression_weight = cfg.regression_weight
        self.regression: StateRegression = task.new_regression()
        self.is_ready = False  # whether the states are standardized, and the layer belongs to this model
        self._has_warned = False

    def standardize(self, samples: Iterable[Tensor]) -> None:
        """Begin a training with hidden states that have mean 0 and variance 1; see :class:`StateRegression`."""
        self.regression.standardize(samples)
        self.is_ready = True

    def load_state_dict(self, state_dict: dict[str, Tensor] | None, strict: bool = True, **options: Any) -> Any:
        """Load the layer of a checkpoint; keep the new one if the checkpoint predicts no states, or other ones."""
        if not state_dict or not self.task.same_auxiliary:
            return None
        self.is_ready = True
        return super().load_state_dict(state_dict, strict, **options)

    def forward(
        self, model: BaseFairseqModel, sample: Sample, reduce: bool = True
    ) -> tuple[Tensor, int | Tensor, LoggingOutput]:
        """The loss summed over the masked tokens, their number, and the logging output."""
        targets, number, logits, extra = project_masked(model, sample, self.padding_idx)
        assert logits is not None
        mlm = token_cross_entropy(logits, targets, ignore_index=self.padding_idx).sum()
        loss = mlm + extra["zero_with_gradient"]
        logging_output = {
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": number,
            "mlm_loss": mlm.detach(),
        }
        if self.is_ready:
            states = sample["states"]
            errors = self.regression(extra["transformed"][: len(states)], states).sum()
            loss = loss + self.regression_weight * errors
            logging_output["state_loss"] = errors.detach()
            logging_output["states"] = states.any(dim=1).sum()
        else:
            self._warn_of_new_layer()
        logging_output["loss"] = loss.detach()
        return loss, number, logging_output

    def _warn_of_new_layer(self) -> None:
        """Say once that fairseq-validate, which only loads the model, leaves out the error of the hidden states."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("the layer that predicts hidden states is not loaded: the loss is that of masked LM alone")

    @staticmethod
    def reduce_metrics(logging_outputs: list[LoggingOutput]) -> None:
        """Log means over the masked tokens of the updates.

        As in fairseq, cross entropies and the whole loss are divided by log 2; ``state_loss`` is in variances.
        """
        means = LoggedMeans(logging_outputs)
        masked = means.total("sample_size")
        means.log("loss", "loss", masked, unit=BIT)
        means.log("mlm_loss", "mlm_loss", masked, unit=BIT)
        if means.has("state_loss"):
            means.log("state_loss", "state_loss", means.total("states"))
