"""Models: encoders and heads only."""

from mlsm_plugin.models import mlsm_roberta, taco_roberta

__all__ = ["mlsm_roberta", "taco_roberta"]
