"""The fairseq task of plain masked LM (Devlin et al., 2019), for auxiliary models and comparisons."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
from dataclasses import dataclass
from typing import Any

from fairseq.tasks import register_task

from mlsm_plugin.tasks.portable_masked_lm import PortableMaskedLMConfig, PortableMaskedLMTask


@dataclass
class PlainMaskedLMConfig(PortableMaskedLMConfig):
    """The options of fairseq's ``masked_lm``, and those for the run."""


@register_task("plain_masked_lm", dataclass=PlainMaskedLMConfig)
class PlainMaskedLMTask(PortableMaskedLMTask):
    """fairseq's ``masked_lm`` with ``--autocast``; it also cuts long sentences, and its checkpoints load anywhere.

    The criterion is fairseq's ``masked_lm``.
    """

    cfg: PlainMaskedLMConfig
    criterions = ("masked_lm", "latent_semantic_kl")

    def build_criterion(self, cfg: Any, *more: Any, **named: Any) -> Any:
        """Build the criterion.

        Raises:
            ValueError: it is that of another task, or needs codes, which the batches do not have.
        """
        criterion = super().build_criterion(cfg, *more, **named)
        if getattr(criterion, "latent_weight", 0) > 0:
            raise ValueError(
                "--criterion latent_semantic_kl needs the codes of --task masked_latent_semantic; pass that task, or "
                "--latent-weight 0 for masked LM alone"
            )
        return criterion
