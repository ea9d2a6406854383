"""Models: encoders and heads only."""

from mlsm_plugin.fairseq_plugin.models import mlsm_deberta, mlsm_modern, mlsm_roberta

__all__ = ["mlsm_deberta", "mlsm_modern", "mlsm_roberta"]
