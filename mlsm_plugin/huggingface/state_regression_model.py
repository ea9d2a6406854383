"""Masked LM with regression of another model's hidden states (Romero et al., 2015), for Hugging Face models."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder
from mlsm_plugin.core.losses.state_regression import StateRegression
from mlsm_plugin.huggingface.auxiliary_states import AuxiliaryStates
from mlsm_plugin.huggingface.collators import IGNORED, Batch
from mlsm_plugin.huggingface.pretraining_model import (
    TRAINER_CHECKPOINT,
    Objective,
    PretrainingModel,
    head_of,
    sums_of_rows,
)

PREFIX = "regression."


class StateRegressionModel(PretrainingModel):
    """A masked LM that also predicts an auxiliary model's hidden states of the masked tokens.

    The auxiliary model reads the unmasked text in each step, up to its layer. ``prepare`` standardizes its states; the
    layer that predicts them is trained, and only saved in a Trainer's checkpoints.

    Args (of :meth:`of` and :meth:`from_pretrained`):
        auxiliary: the model whose hidden states are predicted; it is not trained.
        regression_weight: weight of the mean squared error, which is 1 for a prediction that is always the mean;
            positive and finite. The masked-LM loss has weight 1.
    """

    figures: ClassVar[tuple[str, ...]] = ("state_loss", "mlm_loss", "masked_share")
    added_parts: ClassVar[tuple[str, ...]] = ("regression", "auxiliary_states")
    regression: StateRegression
    auxiliary_states: AuxiliaryStates

    def set_objective(self, *, auxiliary: HuggingFaceEncoder, regression_weight: float = 1.0) -> None:
        """Set the options of the class, and add the layer; ValueError if an option cannot be used."""
        if not 0 < regression_weight < math.inf:
            raise ValueError(f"regression_weight must be positive and finite, got {regression_weight}")
        self.auxiliary_states = AuxiliaryStates(auxiliary)
        self.regression_weight = regression_weight
        device = next(self.parameters()).device
        self.regression = StateRegression(head_of(self).width, auxiliary.dim).to(device)

    def standardize(self, batches: Iterable[Batch]) -> None:
        """Standardize the states by those of a sample of the batches; errors as in :meth:`StateRegression.standardize`.

        A Trainer that resumes replaces these values by those of its checkpoint.
        """
        states = self.auxiliary_states
        self.regression.standardize(states.of_places(**batch["auxiliary"]) for batch in batches)

    def _objective(self, labels: Tensor, *, auxiliary: dict[str, Tensor] | None = None, **inputs: Tensor) -> Objective:
        if auxiliary is None:
            raise ValueError("the batch has no text for the auxiliary model; make it with AuxiliaryTextCollator")
        masked = labels != IGNORED
        states = self.auxiliary_states.of_places(**auxiliary)
        head = head_of(self)
        transformed = head.transform(self._encoded(**inputs)[0][masked])
        mlm = F.cross_entropy(head.project(transformed).float(), labels[masked], reduction="none")
        errors = self.regression(transformed, states)
        number = masked.sum(dim=1)
        parts = [sums_of_rows(errors, masked), number, sums_of_rows(mlm, masked), number, number]
        return mlm.sum() + self.regression_weight * errors.sum(), number.sum(), parts

    def save_pretrained(
        self, save_directory: PathLike, *args: Any, state_dict: dict[str, Tensor] | None = None, **options: Any
    ) -> None:
        """Write a stock model folder; a Trainer's ``checkpoint-N`` also has the layer that predicts the states."""
        state = self.state_dict() if state_dict is None else state_dict
        if not TRAINER_CHECKPOINT.fullmatch(Path(save_directory).name):
            state = {name: values for name, values in state.items() if not name.startswith(PREFIX)}
        super().save_pretrained(save_directory, *args, state_dict=state, **options)
