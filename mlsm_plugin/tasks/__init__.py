"""fairseq tasks: they compose datasets and own options; no maths here."""

from mlsm_plugin.tasks import masked_latent_semantic, nonparametric_masked_lm, span_denoising, taco

__all__ = ["masked_latent_semantic", "nonparametric_masked_lm", "span_denoising", "taco"]
