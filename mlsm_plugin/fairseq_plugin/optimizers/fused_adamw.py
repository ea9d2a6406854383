"""AdamW (Loshchilov and Hutter, 2019) with torch's fused kernel, and Muon for the matrices of layers beside it."""

import ast
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II, OmegaConf
from torch import nn

from mlsm_plugin.core.files.settings import option
from mlsm_plugin.core.optimizers.muon import MUON_RATIO, MuonAdamW, matrices_of_layers
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState, Options
from mlsm_plugin.fairseq_plugin.compat.loading_hooks import check_averages

logger = logging.getLogger(__name__)

Group = dict[str, Any]  # parameters of an optimizer with their settings

GROUP_ATTRIBUTE = "param_group"  # fairseq's FP16Optimizer copies this attribute to its float32 copies
# its values
EMBEDDINGS = "embeddings"
LAYERS = "layers"
SETTINGS = ("betas", "eps", "weight_decay", "momentum")  # of a group
SEPARATE = "use --autocast bf16 instead of --fp16 or --bf16, or add --fp16-no-flatten-grads"


@dataclass
class FusedAdamWConfig(FairseqDataclass):
    """The options of the optimizer, with the names of fairseq's ``adam`` where it has the same options."""

    # Any: text on a command line, two numbers elsewhere
    adam_betas: Any = option((0.9, 0.98), help="decay rates of the running averages, such as '(0.9, 0.98)'")
    adam_eps: float = option(1e-6, help="term added to the denominator")
    weight_decay: float = option(0.01, help="decoupled weight decay, multiplied by the rate")
    decay_matrices_only: bool = option(False, help="no weight decay of norms, biases and embeddings")
    lr: list[float] = field(default=II("optimization.lr"))


@register_optimizer("fused_adamw", dataclass=FusedAdamWConfig)
class FusedAdamW(FairseqOptimizer):
    """``torch.optim.AdamW(fused=True)``, or its ``foreach`` implementation if torch has no fused kernel.

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
        self._optimizer = self._built(params, settings["lr"], settings["betas"], settings["eps"])

    def _built(
        self, params: list[nn.Parameter], lr: float, betas: tuple[float, float], eps: float
    ) -> torch.optim.Optimizer:
        groups: list[Group] = [{"params": params, "weight_decay": self.cfg.weight_decay}]
        if self.cfg.decay_matrices_only:
            groups = decay_groups(params, self.cfg.weight_decay)
        try:
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        except RuntimeError as error:
            logger.info("AdamW is not fused here: %s", error)
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=True)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The settings that all groups share."""
        lr = self.cfg.lr if isinstance(self.cfg.lr, float) else self.cfg.lr[0]
        return {"lr": lr, "betas": _betas(self.cfg.adam_betas), "eps": self.cfg.adam_eps}

    def load_state_dict(self, state_dict: CheckpointState, optimizer_overrides: Options | None = None) -> None:
        """Load the averages of a checkpoint; ValueError if they belong to other parameters.

        Each group keeps the settings of this run, except the rate, which the scheduler sets, and
        ``optimizer_overrides``, which apply to all groups.
        """
        overrides = optimizer_overrides or {}
        settings_of_run = [
            {key: group[key] for key in SETTINGS if key in group} | overrides for group in self.param_groups
        ]
        if len(settings_of_run) != len(state_dict["param_groups"]):
            raise ValueError(
                "--decay-matrices-only differs from the run in the checkpoint; set it as there, or pass "
                "--reset-optimizer"
            )
        super().load_state_dict(state_dict, overrides)
        check_averages(self._optimizer)
        for group, settings in zip(self.param_groups, settings_of_run, strict=True):
            group.update(settings)

    @property
    def supports_flat_params(self) -> bool:
        """Whether a rank may hold a part of all parameters in one vector."""
        return not self.cfg.decay_matrices_only


@dataclass
class MuonConfig(FusedAdamWConfig):
    """The options of Muon, and those of AdamW for all weights but the matrices of the layers."""

    muon_lr: Optional[float] = option(  # noqa: UP045
        None,
        help="learning rate of the matrices of the layers; the schedule keeps its ratio to --lr (default: 10 times)",
    )
    muon_momentum: float = option(0.95, help="momentum of the matrices of the layers")
    muon_weight_decay: float = option(0.0, help="decoupled weight decay of the matrices of the layers")
    muon_block_rows: Optional[int] = option(  # noqa: UP045
        None,
        help="orthogonalize blocks of N rows, such as 64, instead of whole matrices: faster, and better in runs of at "
        "most 1,200 updates",
    )


@register_optimizer("muon", dataclass=MuonConfig)
class Muon(FusedAdamW):
    """:class:`~mlsm_plugin.core.optimizers.muon.MuonAdamW` on the marked matrices (:func:`mark_weights`).

    ValueError if an option is out of range, or all parameters are one flat vector.
    """

    def _built(
        self, params: list[nn.Parameter], lr: float, betas: tuple[float, float], eps: float
    ) -> torch.optim.Optimizer:
        cfg = self.cfg
        rate = MUON_RATIO * lr if cfg.muon_lr is None else cfg.muon_lr
        if rate <= 0 or lr <= 0 or not 0 <= cfg.muon_momentum < 1 or cfg.muon_weight_decay < 0:
            raise ValueError(
                "--lr and --muon-lr must be positive, --muon-momentum in [0, 1) and --muon-weight-decay not negative; "
                f"got {lr}, {rate}, {cfg.muon_momentum} and {cfg.muon_weight_decay}"
            )
        if cfg.muon_block_rows is not None and cfg.muon_block_rows < 1:
            raise ValueError(f"--muon-block-rows must be positive, got {cfg.muon_block_rows}")
        self._ratio = rate / lr
        matrices = [parameter for parameter in params if getattr(parameter, GROUP_ATTRIBUTE, None) == LAYERS]
        if not matrices:
            raise ValueError(f"--optimizer muon needs separate parameters and layers: {SEPARATE}")
        ids_of_matrices = {id(matrix) for matrix in matrices}
        other_parameters = [parameter for parameter in params if id(parameter) not in ids_of_matrices]
        groups: list[Group] = [{"params": other_parameters, "weight_decay": cfg.weight_decay}]
        if cfg.decay_matrices_only:
            groups = decay_groups(other_parameters, cfg.weight_decay)
        return MuonAdamW(
            matrices,
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            muon_lr=rate,
            momentum=cfg.muon_momentum,
            muon_weight_decay=cfg.muon_weight_decay,
            block_rows=cfg.muon_block_rows,
        )

    def set_lr(self, lr: float) -> None:
        """Set the rate of AdamW, and the rate of Muon such that their initial ratio stays."""
        for group in self.param_groups:
            group["lr"] = lr * self._ratio if group["muon"] else lr

    @property
    def supports_flat_params(self) -> bool:
        return False


def mark_weights(model: nn.Module) -> None:
    """Mark the embeddings and the matrices of the layers of ``model``, since an optimizer sees no names."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            setattr(module.weight, GROUP_ATTRIBUTE, EMBEDDINGS)
    for weight in matrices_of_layers(model):
        setattr(weight, GROUP_ATTRIBUTE, LAYERS)


def decay_groups(params: list[nn.Parameter], weight_decay: float) -> list[Group]:
    """Two groups: matrices, with decay; and vectors and marked embeddings, without decay.

    ValueError if no parameter is a matrix, since ``--fp16`` has joined all into one vector.
    """
    embeddings = {id(weight) for weight in params if getattr(weight, GROUP_ATTRIBUTE, None) == EMBEDDINGS}
    decayed = [weight for weight in params if weight.dim() >= 2 and id(weight) not in embeddings]
    not_decayed = [weight for weight in params if weight.dim() < 2 or id(weight) in embeddings]
    if all(weight.dim() < 2 for weight in params):
        raise ValueError(f"--decay-matrices-only needs separate parameters: {SEPARATE}")
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]


def _betas(value: Any) -> tuple[float, float]:
    """The two rates in an option; ValueError if it does not hold two numbers."""
    try:
        rates = ast.literal_eval(value) if isinstance(value, str) else value
        if OmegaConf.is_config(rates):
            rates = OmegaConf.to_container(rates)
        numbers = [float(rate) for rate in rates]
        first, second = numbers
    except (ValueError, TypeError, SyntaxError):
        raise ValueError(f"--adam-betas must be two numbers, such as '(0.9, 0.98)', got {value!r}") from None
    return first, second
