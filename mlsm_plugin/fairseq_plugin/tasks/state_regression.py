"""The fairseq task of masked LM with regression of an auxiliary model's hidden states (Romero et al., 2015)."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
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
from mlsm_plugin.core.hidden_states.sources import alignment_of, source_of
from mlsm_plugin.core.losses.state_regression import StateRegression
from mlsm_plugin.core.masking.masked_share import samples_to_look_at
from mlsm_plugin.fairseq_plugin.coding.masked_states import MaskedStates
from mlsm_plugin.fairseq_plugin.compat.batches import Sample
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState
from mlsm_plugin.fairseq_plugin.compat.model_parts import DividedLMHead, lm_head
from mlsm_plugin.fairseq_plugin.compat.resumed_runs import LAST
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMConfig, BaseMaskedLMTask

AUXILIARY = "states_of"  # keys of the state of the task: SHA-256 of the auxiliary model, and its layer
LAYER = "states_layer"
ALIGNMENT = "states_alignment"  # only if the auxiliary model has another vocabulary than the data
NO_LATENT_HEAD = (
    "--task state_regression needs --arch mlsm_modern_base, mlsm_roberta_base, mlsm_deberta_base, or another size of "
    "these"
)


@dataclass
class StateRegressionTaskConfig(BaseMaskedLMConfig):
    """The options of ``masked_lm``, and of the auxiliary model."""

    # fairseq understands typing.Optional, but not `str | None`
    auxiliary_checkpoint: Optional[str] = option(  # noqa: UP045
        None, help="hf:PATH, for data of any tokenizer, or a checkpoint of fairseq with the vocabulary of the data"
    )
    auxiliary_layer: Optional[int] = option(  # noqa: UP045
        None, help="hidden state of the auxiliary model, by number: 0 is the embeddings (default: the last)"
    )
    auxiliary_fp16: bool = option(
        False,
        help="run the auxiliary model in float16, on a CPU with products in bfloat16. By default its products are in "
        "bfloat16 if the device is fast in it",
    )


@register_task("state_regression", dataclass=StateRegressionTaskConfig)
class StateRegressionTask(BaseMaskedLMTask):
    """Masked LM whose batches also carry an auxiliary model's hidden states of the masked tokens.

    A batch is a batch of ``masked_lm`` plus ``states`` (n_masked, dim) float32. Each step computes them from the
    unmasked text.
    """

    cfg: StateRegressionTaskConfig
    criterions = ("state_regression",)
    predicts_same_states = True  # whether the checkpoint that is loaded predicts the states of this run
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
        return StateRegression(self._head_width, self._masked_states.load_encoder().dim)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load the samples of ``masked_lm``; ValueError if the auxiliary model does not fit them."""
        self._masked_states.load_encoder()  # reports errors before the first batch
        self.state.merge_state_dict(self._states_record())
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)

    def _states_record(self) -> dict[str, object]:
        """What decides the hidden states."""
        states = self._masked_states
        model = source_of(states.checkpoint).fingerprint_of(states.checkpoint)
        alignment = alignment_of(states.checkpoint, states.data_bin)
        return {AUXILIARY: model, LAYER: states.layer, **({ALIGNMENT: alignment} if alignment else {})}

    def check_starts_from(self, checkpoint: Path, saved: CheckpointState) -> None:
        """See :meth:`PluginTask.check_starts_from`; also note whether the criterion's layer can be loaded."""
        super().check_starts_from(checkpoint, saved)
        record = self._states_record()
        self.predicts_same_states = all(saved.get(name) == value for name, value in record.items())
        resumes = checkpoint.absolute() == Path(self.cfg.save_dir, LAST).absolute()
        if resumes and AUXILIARY in saved:
            self.check_resumes(saved)  # before weights of another width are loaded

    def check_resumes(self, saved: CheckpointState) -> None:
        """Raise ValueError if a run resumes with another auxiliary model or layer than its state ``saved`` records."""
        state = self._states_record()
        if AUXILIARY not in saved:
            raise ValueError("the run began without an auxiliary model; pass another --save-dir")
        if saved.get(AUXILIARY) != state[AUXILIARY]:
            raise ValueError("--auxiliary-checkpoint is another model than that of the run; pass another --save-dir")
        if saved.get(LAYER) != state[LAYER]:
            raise ValueError(
                f"--auxiliary-layer is {state[LAYER]}, and the run began with {saved.get(LAYER)}; pass that, or "
                "another --save-dir"
            )
        if saved.get(ALIGNMENT) != state.get(ALIGNMENT):
            raise ValueError(
                "the tokenizer of --auxiliary-checkpoint is another one than that of the run; pass another --save-dir"
            )

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
        return {**sample, "states": self._masked_states.states(tokens, masked)}

    @cached_property
    def _masked_states(self) -> MaskedStates:
        """The reader of the auxiliary model, made on first use, so that a checkpoint loads without that model."""
        if not self.cfg.auxiliary_checkpoint:
            raise ValueError("--task state_regression needs --auxiliary-checkpoint")
        return MaskedStates(
            utils.split_paths(self.cfg.data)[0],
            checkpoint=self.cfg.auxiliary_checkpoint,
            layer=self.cfg.auxiliary_layer,
            fp16=self.cfg.auxiliary_fp16 or None,
            tokens_per_sample=self.cfg.tokens_per_sample,
        )
