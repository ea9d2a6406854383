"""``--autocast``: matrix products in bfloat16; weights, optimizer and losses stay in float32."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from mlsm_plugin.hidden_states.devices import has_fast_bf16
from mlsm_plugin.optimizers.fused_adamw import mark_embeddings

logger = logging.getLogger(__name__)

AUTOCAST_CHOICES = ChoiceEnum(["auto", "bf16", "off"])


@dataclass
class AutocastConfig(FairseqDataclass):
    """The precision of a training step."""

    autocast: AUTOCAST_CHOICES = field(  # type: ignore[valid-type]
        default="off",
        metadata={
            "help": "bf16: matrix products in bfloat16, weights, optimizer and losses in float32; auto: bf16 where the "
            "machine is fast in it (`mlsm doctor` says so); off: everything in the precision of the weights"
        },
    )
    fp16: bool = II("common.fp16")
    bf16: bool = II("common.bf16")
    amp: bool = II("common.amp")


class AutocastSteps:
    """A mixin for tasks: training and validation steps under ``torch.autocast``, as ``cfg.autocast`` says.

    Only the criterion runs in it, and its loss function computes in float32. Backward passes follow the types of the
    forward pass.

    Raises:
        ValueError: ``bf16`` together with another kind of reduced precision.
    """

    cfg: AutocastConfig

    def __init__(self, cfg: AutocastConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(cfg, *arguments, **named)  # type: ignore[call-arg]
        self._others = [f"--{name}" for name in ("fp16", "bf16", "amp") if getattr(cfg, name, False)]
        if str(cfg.autocast) == "bf16" and self._others:
            raise ValueError(f"--autocast bf16 keeps the weights in float32; leave out {' and '.join(self._others)}")
        self._logged = False

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model, with marks that the optimizer reads (:func:`mark_embeddings`)."""
        model = super().build_model(cfg, from_checkpoint)  # type: ignore[misc]
        mark_embeddings(model)
        return model

    def train_step(
        self, sample: Any, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad: bool = False
    ) -> Any:
        """See :meth:`FairseqTask.train_step`."""
        criterion = self._in_precision(criterion)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)  # type: ignore[misc]

    def valid_step(self, sample: Any, model: Any, criterion: Any) -> Any:
        """See :meth:`FairseqTask.valid_step`."""
        return super().valid_step(sample, model, self._in_precision(criterion))  # type: ignore[misc]

    def _in_precision(self, criterion: Any) -> Callable[[Any, Any], Any]:
        """What computes ``criterion`` for a model and a sample."""
        if str(self.cfg.autocast) == "off":
            return criterion

        def compute(model: Any, sample: Any) -> Any:
            with self.precision(next(model.parameters()).device):
                return criterion(model, sample)

        return compute

    def precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context of a step on ``device``, unless ``--autocast`` is off."""
        chosen = str(self.cfg.autocast) == "bf16" or (not self._others and has_fast_bf16(device))
        if not self._logged:
            self._logged = True
            logger.info("--autocast %s: %s", self.cfg.autocast, "bf16" if chosen else "off")
        return torch.autocast(device.type, torch.bfloat16) if chosen else contextlib.nullcontext()
