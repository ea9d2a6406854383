"""A RoBERTa whose LM head also predicts the latent semantic properties of a token."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq.models import register_model
from fairseq.models.roberta.model import RobertaModel, base_architecture
from fairseq.utils import safe_getattr

from mlsm_plugin.fairseq_seams import version_shims
from mlsm_plugin.fairseq_seams.roberta_parts import sentence_encoder
from mlsm_plugin.models.latent_semantic_model import SIZES, LatentSemanticModel, register_sizes


@register_model("mlsm_roberta")
class MlsmRobertaModel(LatentSemanticModel):
    """fairseq's RoBERTa with a latent head; without one, its parameters start as those of ``roberta``."""

    def finish_parameters(self) -> None:
        """See :meth:`LatentSemanticModel.finish_parameters`."""
        version_shims.freeze_inference_copies(sentence_encoder(self).layers)

    @staticmethod
    def add_args(parser: argparse.ArgumentParser) -> None:
        """Add the options of ``roberta``, and the size of the latent head."""
        RobertaModel.add_args(parser)
        LatentSemanticModel.add_atoms_option(parser)


def _architecture(args: Any, layers: int, dim: int) -> None:
    args.encoder_layers = safe_getattr(args, "encoder_layers", layers)
    args.encoder_embed_dim = safe_getattr(args, "encoder_embed_dim", dim)
    args.encoder_ffn_embed_dim = safe_getattr(args, "encoder_ffn_embed_dim", 4 * args.encoder_embed_dim)
    args.encoder_attention_heads = safe_getattr(args, "encoder_attention_heads", max(1, args.encoder_embed_dim // 64))
    args.num_atoms = safe_getattr(args, "num_atoms", None)
    base_architecture(args)


register_sizes("mlsm_roberta", _architecture, SIZES | {"large": (24, 1024)})
