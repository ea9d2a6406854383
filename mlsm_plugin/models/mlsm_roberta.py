"""A RoBERTa whose LM head also predicts the latent semantic properties of a token."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta.model import RobertaModel, base_architecture
from fairseq.utils import safe_getattr

from mlsm_plugin.fairseq_seams import version_shims
from mlsm_plugin.fairseq_seams.roberta_parts import sentence_encoder
from mlsm_plugin.models.latent_semantic_model import LatentSemanticModel


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


def _architecture(args: Any, *, layers: int, dim: int) -> None:
    args.encoder_layers = safe_getattr(args, "encoder_layers", layers)
    args.encoder_embed_dim = safe_getattr(args, "encoder_embed_dim", dim)
    args.encoder_ffn_embed_dim = safe_getattr(args, "encoder_ffn_embed_dim", 4 * args.encoder_embed_dim)
    args.encoder_attention_heads = safe_getattr(args, "encoder_attention_heads", max(1, args.encoder_embed_dim // 64))
    args.num_atoms = safe_getattr(args, "num_atoms", None)
    base_architecture(args)


@register_model_architecture("mlsm_roberta", "mlsm_roberta")
def mlsm_roberta(args: Any) -> None:
    """The size of BERT base, unless options set other sizes."""
    _architecture(args, layers=12, dim=768)


@register_model_architecture("mlsm_roberta", "mlsm_roberta_tiny")
def mlsm_roberta_tiny(args: Any) -> None:
    """2 layers, width 128 (Turc et al., 2019)."""
    _architecture(args, layers=2, dim=128)


@register_model_architecture("mlsm_roberta", "mlsm_roberta_small")
def mlsm_roberta_small(args: Any) -> None:
    """4 layers, width 512 (Turc et al., 2019)."""
    _architecture(args, layers=4, dim=512)


@register_model_architecture("mlsm_roberta", "mlsm_roberta_medium")
def mlsm_roberta_medium(args: Any) -> None:
    """8 layers, width 512 (Turc et al., 2019)."""
    _architecture(args, layers=8, dim=512)


@register_model_architecture("mlsm_roberta", "mlsm_roberta_base")
def mlsm_roberta_base(args: Any) -> None:
    """12 layers, width 768."""
    _architecture(args, layers=12, dim=768)


@register_model_architecture("mlsm_roberta", "mlsm_roberta_large")
def mlsm_roberta_large(args: Any) -> None:
    """24 layers, width 1024."""
    _architecture(args, layers=24, dim=1024)
