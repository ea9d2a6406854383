"""The fairseq task of masked LM with regression of an auxiliary model's hidden states (Romero et al., 2015)."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.trainer import Trainer
from torch import Tensor

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.losses.state_regression import StateRegression
from mlsm_plugin.core.masking.masked_share import samples_to_look_at
from mlsm_plugin.fairseq_plugin.compat.batches import Sample
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState
from mlsm_plugin.fairseq_plugin.compat.model_parts import DividedLMHead, lm_head
from mlsm_plugin.fairseq_plugin.tasks.auxiliary_model_task import AuxiliaryModelConfig, AuxiliaryModelTask
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMConfig

NO_LATENT_HEAD = (
    "--task state_regression needs --arch mlsm_modern_base, mlsm_roberta_base, mlsm_deberta_base, or another size of "
    "these"
)


@dataclass
class StateRegressionTaskConfig(AuxiliaryModelConfig, BaseMaskedLMConfig):
    """The options of ``masked_lm``, and of the auxiliary model."""

    # fairseq understands typing.Optional, but not `int | None`
    auxiliary_layer: Optional[int] = option(  # noqa: UP045
        None, help="hidden state of the auxiliary model, by number: 0 is the embeddings (default: the last)"
    )


@register_task("state_regression", dataclass=StateRegressionTaskConfig)
class StateRegressionTask(AuxiliaryModelTask):
    """Masked LM whose batches also carry an auxiliary model's hidden states of the masked tokens.

    A batch is a batch of ``masked_lm`` plus ``states`` (n_masked, dim) float32. Each step computes them from the
    unmasked text.
    """

    cfg: StateRegressionTaskConfig
    criterions = ("state_regression",)
    computes = "states"
    _head_width = 0

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the model; ValueError if it is not one of this package."""
        model = super().build_model(cfg, from_checkpoint)
        head = lm_head(model)
        if not isinstance(head, DividedLMHead):
            raise ValueError(NO_LATENT_HEAD)
        self._head_width = head.width
        return model

    def new_regression(self) -> StateRegression:
        """A new layer that predicts hidden states, for the criterion."""
        return StateRegression(self._head_width, self.auxiliary.load_encoder().dim)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load the samples of ``masked_lm``; ValueError if the auxiliary model does not fit them."""
        self.open_auxiliary()  # reports errors before the first batch
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)

    def begin_run(self, trainer: Trainer, saved: CheckpointState) -> None:
        """Standardize the hidden states by those of a sample of the text; a run that goes on has its values already."""
        super().begin_run(trainer, saved)
        criterion = trainer.get_criterion()
        goes_on = bool(saved) or trainer.get_num_updates() > 0
        if not (goes_on and criterion.is_ready):
            criterion.standardize(self._sample_states(trainer.device))

    def _sample_states(self, device: torch.device) -> Iterator[Tensor]:
        dataset = self.datasets[self.cfg.train_subset]
        for index in samples_to_look_at(len(dataset)):
            sample = dataset.collater([dataset[index]])
            yield self._with_states(utils.apply_to_sample(lambda part: part.to(device), sample))["states"]

    def prepare_batch(self, sample: Sample, criterion: FairseqCriterion, update_num: int | None) -> Sample:
        """The batch also gets the hidden states of its masked tokens."""
        return self._with_states(super().prepare_batch(sample, criterion, update_num))

    def _with_states(self, sample: Sample) -> Sample:
        tokens = self._unmasked(sample["net_input"]["src_tokens"], sample["target"])
        masked = sample["target"] != self.source_dictionary.pad()
        return {**sample, "states": self.auxiliary.states(tokens, masked)}
