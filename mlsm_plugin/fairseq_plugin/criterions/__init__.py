"""fairseq's criterions: thin classes around the functions and modules of ``losses``."""

from mlsm_plugin.fairseq_plugin.criterions import (
    latent_semantic_kl,
    sentence_vectors,
    span_contrastive,
    state_regression,
    token_contrastive,
)

__all__ = ["latent_semantic_kl", "sentence_vectors", "span_contrastive", "state_regression", "token_contrastive"]
