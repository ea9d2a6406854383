"""AdamW (Loshchilov and Hutter, 2019) as one fused kernel of torch, on the CPU and on GPUs."""

# no `from __future__ import annotations`: fairseq reads the option types at run time
import ast
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II, OmegaConf
from torch import nn

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.fairseq_door.seams.loading_hooks import check_averages

logger = logging.getLogger(__name__)

# fairseq's FP16Optimizer copies this attribute to its float32 copies
GROUP_ATTRIBUTE, EMBEDDINGS = "param_group", "embeddings"
SETTINGS = ("betas", "eps", "weight_decay")  # of a group


@dataclass
class FusedAdamWConfig(FairseqDataclass):
    """The options of the optimizer; those that fairseq's ``adam`` has too are named as there."""

    adam_betas: Any = option((0.9, 0.98), help="decay rates of the running averages, such as '(0.9, 0.98)'")
    adam_eps: float = option(1e-6, help="term added to the denominator")
    weight_decay: float = option(0.01, help="decoupled weight decay, multiplied by the rate")
    decay_matrices_only: bool = option(False, help="no weight decay of norms, biases and embeddings")
    lr: list[float] = field(default=II("optimization.lr"))


@register_optimizer("fused_adamw", dataclass=FusedAdamWConfig)
class FusedAdamW(FairseqOptimizer):
    """``torch.optim.AdamW(fused=True)``; where torch has no fused kernel, its ``foreach`` implementation.

    ValueError if an option is out of range, or ``decay_matrices_only`` gets flat parameters.
    """

    def __init__(self, cfg: FusedAdamWConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        params = list(params)
        settings = self.optimizer_config
        if not all(0 <= beta < 1 for beta in settings["betas"]) or not settings["eps"] > 0 or cfg.weight_decay < 0:
            raise ValueError(
                "--adam-betas must be in [0, 1), --adam-eps positive and --weight-decay not negative; got "
                f"{settings['betas']}, {settings['eps']} and {cfg.weight_decay}"
            )
        groups = [{"params": params, "weight_decay": cfg.weight_decay}]
        if cfg.decay_matrices_only:
            groups = decay_groups(params, cfg.weight_decay)
        try:
            self._optimizer = torch.optim.AdamW(groups, fused=True, **settings)
        except RuntimeError as error:
            logger.info("AdamW is not fused here: %s", error)
            self._optimizer = torch.optim.AdamW(groups, foreach=True, **settings)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The settings that all groups share."""
        lr = self.cfg.lr if isinstance(self.cfg.lr, float) else self.cfg.lr[0]
        return {"lr": lr, "betas": _betas(self.cfg.adam_betas), "eps": self.cfg.adam_eps}

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """Load the averages of a checkpoint; ValueError if they are those of other parameters.

        The settings of each group stay those of this run, except the rate, which the scheduler sets, and what
        ``optimizer_overrides`` names, in all groups.
        """
        overrides = optimizer_overrides or {}
        own = [{key: group[key] for key in SETTINGS} | overrides for group in self.param_groups]
        if len(own) != len(state_dict["param_groups"]):
            raise ValueError(
                "--decay-matrices-only differs from the run in the checkpoint; set it as there, or pass "
                "--reset-optimizer"
            )
        super().load_state_dict(state_dict, overrides)
        check_averages(self._optimizer)
        for group, settings in zip(self.param_groups, own, strict=True):
            group.update(settings)

    @property
    def supports_flat_params(self) -> bool:
        """Whether a rank may hold a part of all parameters in one vector."""
        return not self.cfg.decay_matrices_only


def mark_embeddings(model: nn.Module) -> None:
    """Mark the weights of all embeddings in ``model``, so that ``--decay-matrices-only`` knows them."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            setattr(module.weight, GROUP_ATTRIBUTE, EMBEDDINGS)


def decay_groups(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, with decay; and vectors and marked embeddings, without.

    ValueError if no parameter is a matrix, since ``--fp16`` has joined all into one vector.
    """
    embeddings = {id(one) for one in params if getattr(one, GROUP_ATTRIBUTE, None) == EMBEDDINGS}
    matrices = [one for one in params if one.dim() >= 2 and id(one) not in embeddings]
    others = [one for one in params if one.dim() < 2 or id(one) in embeddings]
    if not matrices:
        raise ValueError(
            "--decay-matrices-only needs separate parameters: use --autocast bf16 instead of --fp16 or --bf16, or add "
            "--fp16-no-flatten-grads"
        )
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _betas(given: Any) -> tuple[float, float]:
    """The two rates; raises ValueError if ``given`` is something else."""
    try:
        found = ast.literal_eval(given) if isinstance(given, str) else given
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found)
        first, second = (float(rate) for rate in found)
    except (ValueError, TypeError, SyntaxError):
        raise ValueError(f"--adam-betas must be two numbers, such as '(0.9, 0.98)', got {given!r}") from None
    return first, second
