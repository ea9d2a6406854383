"""fairseq tasks: they compose datasets and own options; no maths here."""

from mlsm_plugin.tasks import masked_latent_semantic, taco

__all__ = ["masked_latent_semantic", "taco"]
