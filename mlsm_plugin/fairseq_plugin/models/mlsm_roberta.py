"""fairseq's models: RoBERTa with a latent head, RoBERTa in TACO's sizes, and the encoder-decoder of span denoising."""

import argparse
import functools

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta.model import RobertaModel, base_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture as transformer_architecture
from fairseq.utils import safe_getattr

from mlsm_plugin.fairseq_plugin.compat.model_parts import set_layer_norm_epsilon
from mlsm_plugin.fairseq_plugin.models.latent_head_model import (
    ARCHITECTURE_SIZES,
    LatentHeadModel,
    register_sizes,
    set_missing,
)


@register_model("mlsm_roberta")
class MlsmRobertaModel(LatentHeadModel):
    """fairseq's RoBERTa with a latent head; without the head, its parameters start like those of ``roberta``."""

    @staticmethod
    def add_args(parser: argparse.ArgumentParser) -> None:
        RobertaModel.add_args(parser)
        LatentHeadModel.add_atoms_option(parser)
        text = "what layer norms add to the variance (default: 1e-5; BERT has 1e-12)"
        parser.add_argument("--layer-norm-eps", type=float, metavar="E", help=text)

    def finish_parameters(self) -> None:
        epsilon = safe_getattr(self.args, "layer_norm_eps", None)
        if epsilon is not None:
            if not epsilon > 0:
                raise ValueError(f"--layer-norm-eps must be positive, got {epsilon}")
            set_layer_norm_epsilon(self, epsilon)


def _architecture(args: FairseqDataclass, layers: int, dim: int) -> None:
    set_missing(args, encoder_layers=layers, encoder_embed_dim=dim, num_atoms=None)
    dim = args.encoder_embed_dim
    set_missing(args, encoder_ffn_embed_dim=4 * dim, encoder_attention_heads=max(1, dim // 64))
    base_architecture(args)


register_sizes("mlsm_roberta", _architecture, ARCHITECTURE_SIZES | {"large": (24, 1024)})


@register_model_architecture("roberta", "taco_small")
def taco_small(args: FairseqDataclass) -> None:
    """4 layers, width 512, 8 heads."""
    set_missing(args, encoder_layers=4, encoder_embed_dim=512, encoder_ffn_embed_dim=2048, encoder_attention_heads=8)
    base_architecture(args)


# the size of BERT base: 12 layers, width 768, 12 heads
taco_base = register_model_architecture("roberta", "taco_base")(base_architecture)


def _denoising_architecture(args: FairseqDataclass, layers: int, dim: int) -> None:
    """Put layer norms before the blocks, and share the embeddings of encoder, decoder and output."""
    set_missing(args, encoder_embed_dim=dim, encoder_layers=layers, encoder_attention_heads=dim // 64)
    set_missing(args, encoder_normalize_before=True, encoder_learned_pos=True, decoder_normalize_before=True)
    set_missing(args, decoder_learned_pos=True, share_all_embeddings=True, activation_fn="gelu")
    set_missing(args, encoder_ffn_embed_dim=4 * args.encoder_embed_dim, decoder_layers=args.encoder_layers)
    set_missing(args, decoder_attention_heads=args.encoder_attention_heads)
    transformer_architecture(args)


# layers of each side, and width; a head is 64 wide
denoising_small = register_model_architecture("transformer", "denoising_small")(
    functools.partial(_denoising_architecture, layers=6, dim=512)
)
denoising_base = register_model_architecture("transformer", "denoising_base")(
    functools.partial(_denoising_architecture, layers=12, dim=768)
)
