"""Models: encoders and heads only."""

from mlsm_plugin.models import denoising_transformer, mlsm_modern, mlsm_roberta, taco_roberta

__all__ = ["denoising_transformer", "mlsm_modern", "mlsm_roberta", "taco_roberta"]
