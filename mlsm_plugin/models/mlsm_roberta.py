"""Models of fairseq: RoBERTa with a latent head, in the sizes of TACO, and the encoder-decoder of span denoising."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta.model import RobertaModel, base_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture as transformer_architecture
from fairseq.utils import safe_getattr

from mlsm_plugin.models.latent_semantic_model import SIZES, LatentSemanticModel, register_sizes


@register_model("mlsm_roberta")
class MlsmRobertaModel(LatentSemanticModel):
    """fairseq's RoBERTa with a latent head; without one, its parameters start as those of ``roberta``."""

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


@register_model_architecture("roberta", "taco_small")
def taco_small(args: Any) -> None:
    """4 layers, width 512, 8 heads."""
    args.encoder_layers = safe_getattr(args, "encoder_layers", 4)
    args.encoder_embed_dim = safe_getattr(args, "encoder_embed_dim", 512)
    args.encoder_ffn_embed_dim = safe_getattr(args, "encoder_ffn_embed_dim", 2048)
    args.encoder_attention_heads = safe_getattr(args, "encoder_attention_heads", 8)
    base_architecture(args)


@register_model_architecture("roberta", "taco_base")
def taco_base(args: Any) -> None:
    """12 layers, width 768, 12 heads: the size of BERT base."""
    base_architecture(args)


def _denoising_architecture(args: Any, *, layers: int, dim: int) -> None:
    """Put layer norms before the blocks, and share the embeddings of encoder, decoder and output."""
    defaults = {
        "encoder_embed_dim": dim,
        "encoder_layers": layers,
        "encoder_attention_heads": dim // 64,
        "encoder_normalize_before": True,
        "encoder_learned_pos": True,
        "decoder_normalize_before": True,
        "decoder_learned_pos": True,
        "share_all_embeddings": True,
        "activation_fn": "gelu",
    }
    for name, value in defaults.items():
        setattr(args, name, safe_getattr(args, name, value))
    args.encoder_ffn_embed_dim = safe_getattr(args, "encoder_ffn_embed_dim", 4 * args.encoder_embed_dim)
    args.decoder_layers = safe_getattr(args, "decoder_layers", args.encoder_layers)
    args.decoder_attention_heads = safe_getattr(args, "decoder_attention_heads", args.encoder_attention_heads)
    transformer_architecture(args)


@register_model_architecture("transformer", "denoising_small")
def denoising_small(args: Any) -> None:
    """6 + 6 layers, width 512, 8 heads."""
    _denoising_architecture(args, layers=6, dim=512)


@register_model_architecture("transformer", "denoising_base")
def denoising_base(args: Any) -> None:
    """12 + 12 layers, width 768, 12 heads."""
    _denoising_architecture(args, layers=12, dim=768)
