"""fairseq's tasks, which compose datasets and define their options; the mathematics is in ``losses``."""

from mlsm_plugin.fairseq_plugin.tasks import (
    base_masked_lm,
    masked_latent_semantic,
    nonparametric_masked_lm,
    sentence_vectors,
    span_denoising,
    state_regression,
    taco,
)

__all__ = [
    "base_masked_lm",
    "masked_latent_semantic",
    "nonparametric_masked_lm",
    "sentence_vectors",
    "span_denoising",
    "state_regression",
    "taco",
]
