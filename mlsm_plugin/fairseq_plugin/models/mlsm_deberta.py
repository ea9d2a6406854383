"""An encoder with disentangled attention; Hugging Face's DebertaV2 computes the same (see ``deberta_layers``)."""

from typing import ClassVar

from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from fairseq.models.roberta.model import base_architecture
from torch import nn

from mlsm_plugin.fairseq_plugin.models.deberta_layers import EPSILON, DebertaSize, DebertaTransformer
from mlsm_plugin.fairseq_plugin.models.latent_head_model import (
    ARCHITECTURE_SIZES,
    LatentHead,
    register_sizes,
    set_missing,
)
from mlsm_plugin.fairseq_plugin.models.mlsm_modern import BY_WIDTH, MlsmModernModel, ModernEncoder
from mlsm_plugin.fairseq_plugin.models.modern_layers import Norm


class DebertaHead(LatentHead):
    """The LM head with the norm of the encoder."""

    def __init__(self, embed_dim: int, output_dim: int, activation_fn: str, weight: nn.Parameter | None = None) -> None:
        super().__init__(embed_dim, output_dim, activation_fn, weight)
        self.layer_norm = Norm(embed_dim, bias=True, eps=EPSILON)
        self.activation_fn = nn.functional.gelu  # fairseq's gelu computes in float32


class DebertaEncoder(ModernEncoder):
    """A :class:`DebertaTransformer` with a :class:`DebertaHead`."""

    one_graph = False  # not measured

    def build_encoder(
        self, args: FairseqDataclass, dictionary: Dictionary, embed_tokens: nn.Embedding
    ) -> DebertaTransformer:
        """The layers, from the options of the architecture; fairseq calls this."""
        return DebertaTransformer(size_of(args, len(dictionary), dictionary.pad()), embed_tokens)

    def build_lm_head(
        self, embed_dim: int, output_dim: int, activation_fn: str, weight: nn.Parameter | None
    ) -> DebertaHead:
        """The head; ``weight`` is the weight of the token embeddings. fairseq calls this."""
        return DebertaHead(embed_dim, output_dim, activation_fn, weight)


@register_model("mlsm_deberta")
class MlsmDebertaModel(MlsmModernModel):
    """A DeBERTa-v2 with a latent head."""

    encoder_class = DebertaEncoder
    initialization = BY_WIDTH  # with BERT's initialization, this post-norm model does not begin to learn
    ffn_name = "MLP"
    ffn_width = "4 times the width"
    whole_options: ClassVar = {
        "position-buckets": "number of buckets for the distances to one side; those up to half of N have one each. 0: "
        "all do (default: 256)",
        "max-relative-positions": "distance in tokens from which all count as the same (default: 512)",
    }
    real_options: ClassVar = {}


def size_of(args: FairseqDataclass, num_symbols: int, padding: int) -> DebertaSize:
    """The encoder's size from the options; ValueError if an option is out of range."""
    dim = args.encoder_embed_dim
    heads = args.encoder_attention_heads
    buckets = args.position_buckets
    longest = args.max_relative_positions
    if heads < 1 or dim % heads:
        raise ValueError(f"--encoder-embed-dim {dim} is not a multiple of --encoder-attention-heads {heads}")
    if buckets < 0 or buckets == 1:
        raise ValueError(f"--position-buckets must be 0 or at least 2, got {buckets}")
    if longest < buckets // 2 + 2:
        least = f"{buckets // 2 + 2} with --position-buckets {buckets}"
        raise ValueError(f"--max-relative-positions must be at least {least}, got {longest}")
    return DebertaSize(
        num_symbols=num_symbols,
        padding=padding,
        layers=args.encoder_layers,
        dim=dim,
        ffn_dim=args.encoder_ffn_embed_dim,
        heads=heads,
        dropout=args.dropout,
        attention_dropout=args.attention_dropout,
        activation_dropout=args.activation_dropout,
        buckets=buckets,
        longest=longest,
    )


def architecture(args: FairseqDataclass, layers: int, dim: int) -> None:
    """Set options that have no value yet; ``layers`` and ``dim`` are the default size."""
    set_missing(args, encoder_layers=layers, encoder_embed_dim=dim)
    dim = args.encoder_embed_dim
    set_missing(args, encoder_ffn_embed_dim=4 * dim, encoder_attention_heads=max(1, dim // 64))
    set_missing(args, dropout=0.0, attention_dropout=0.0, initialization=BY_WIDTH, num_atoms=None)
    set_missing(args, position_buckets=256, max_relative_positions=512)
    base_architecture(args)


register_sizes("mlsm_deberta", architecture, ARCHITECTURE_SIZES)
