"""Optimizers that register with fairseq."""

from mlsm_plugin.fairseq_door.optimizers import fused_adamw

__all__ = ["fused_adamw"]
