"""fairseq's criterions: thin classes around the pure functions of ``losses``."""

from mlsm_plugin.fairseq_plugin.criterions import latent_semantic_kl, span_contrastive, token_contrastive

__all__ = ["latent_semantic_kl", "span_contrastive", "token_contrastive"]
