"""Optimizers that register with fairseq."""

from mlsm_plugin.fairseq_plugin.optimizers import fused_adamw

__all__ = ["fused_adamw"]
