"""Criterions: each a pure loss function (tensors in, tensor out) and a thin fairseq class."""

from mlsm_plugin.criterions import latent_semantic_kl, span_contrastive, token_contrastive

__all__ = ["latent_semantic_kl", "span_contrastive", "token_contrastive"]
