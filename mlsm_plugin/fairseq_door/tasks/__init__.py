"""fairseq's tasks, which compose datasets and define their options; the mathematics is in ``losses``."""

from mlsm_plugin.fairseq_door.tasks import (
    masked_latent_semantic,
    nonparametric_masked_lm,
    portable_masked_lm,
    span_denoising,
    taco,
)

__all__ = ["masked_latent_semantic", "nonparametric_masked_lm", "portable_masked_lm", "span_denoising", "taco"]
