"""The losses: pure functions of tensors, and one module with weights. Nothing in this folder imports fairseq."""

from mlsm_plugin.core.losses.cross_entropy import distillation_kl, token_cross_entropy
from mlsm_plugin.core.losses.latent_semantic import (
    LatentSemanticTerms,
    latent_semantic_kl,
    latent_semantic_terms,
    strongest_atom_cross_entropy,
)
from mlsm_plugin.core.losses.sentence_vectors import leading_directions, mean_vectors, share_kept, vector_errors
from mlsm_plugin.core.losses.span_contrastive import SpanTerms, span_batch_terms, span_contrastive_terms
from mlsm_plugin.core.losses.state_regression import StateRegression
from mlsm_plugin.core.losses.token_contrastive import Contrast, ContrastiveTerms, contrastive_terms

__all__ = [
    "Contrast",
    "ContrastiveTerms",
    "LatentSemanticTerms",
    "SpanTerms",
    "StateRegression",
    "contrastive_terms",
    "distillation_kl",
    "latent_semantic_kl",
    "latent_semantic_terms",
    "leading_directions",
    "mean_vectors",
    "share_kept",
    "span_batch_terms",
    "span_contrastive_terms",
    "strongest_atom_cross_entropy",
    "token_cross_entropy",
    "vector_errors",
]
