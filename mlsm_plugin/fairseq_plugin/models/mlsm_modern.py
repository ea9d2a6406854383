"""A modern encoder: pre-norm, rotary positions, GeGLU, no biases; Hugging Face's ModernBERT computes the same.

Source: Warner et al., "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder for Fast, Memory Efficient, and
Long Context Finetuning and Inference", 2024, arXiv 2412.13663.
"""

import argparse
from typing import ClassVar

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from fairseq.models.roberta.model import base_architecture
from fairseq.utils import get_available_activation_fns, safe_getattr
from torch import Tensor, nn

from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens
from mlsm_plugin.fairseq_plugin.compat.model_parts import Extra, hidden_states_in, lm_head, sentence_encoder
from mlsm_plugin.fairseq_plugin.models.latent_head_model import (
    ARCHITECTURE_SIZES,
    LatentHead,
    LatentHeadEncoder,
    LatentHeadModel,
    register_sizes,
    set_missing,
)
from mlsm_plugin.fairseq_plugin.models.modern_layers import ModernSize, ModernTransformer, Norm
from mlsm_plugin.huggingface.student_model import geglu_dim

# with at least this many positions, most layers only see a window, unless --attention-window says otherwise
POSITIONS_WITH_WINDOW = 512
DEFAULT_WINDOW = 128
# initializations of the weights
BY_BERT = "bert"
BY_WIDTH = "width"


class ModernHead(LatentHead):
    """The LM head without biases, except the vocabulary bias."""

    def __init__(self, embed_dim: int, output_dim: int, activation_fn: str, weight: nn.Parameter | None = None) -> None:
        super().__init__(embed_dim, output_dim, activation_fn, weight)
        self.dense = nn.Linear(embed_dim, embed_dim, bias=False)
        self.layer_norm = Norm(embed_dim)
        self.activation_fn = nn.functional.gelu  # fairseq's gelu computes in float32


class ModernEncoder(LatentHeadEncoder):
    """A :class:`ModernTransformer` with a :class:`ModernHead`."""

    one_graph = True  # torch.compile makes a single graph of it

    def build_encoder(
        self, args: FairseqDataclass, dictionary: Dictionary, embed_tokens: nn.Embedding
    ) -> ModernTransformer:
        """The layers, from the options of the architecture; fairseq calls this."""
        return ModernTransformer(size_of(args, len(dictionary), dictionary.pad()), embed_tokens)

    def build_lm_head(
        self, embed_dim: int, output_dim: int, activation_fn: str, weight: nn.Parameter | None
    ) -> ModernHead:
        """The head; ``weight`` is the weight of the token embeddings. fairseq calls this."""
        return ModernHead(embed_dim, output_dim, activation_fn, weight)

    def extract_features(
        self, src_tokens: Tensor, return_all_hiddens: bool = False, has_padding: bool | None = None, **unused: object
    ) -> tuple[Tensor, Extra]:
        """The final hidden states ``(B, T, dim)``; arguments are those of :meth:`ModernTransformer.forward`."""
        output = self.sentence_encoder(src_tokens, return_all_hiddens=return_all_hiddens, has_padding=has_padding)
        features, states = hidden_states_in(output)
        return features, {"inner_states": states if return_all_hiddens else None}

    def features_to_project(
        self, src_tokens: Tensor, only: ChosenTokens | None, return_all_hiddens: bool, has_padding: bool | None
    ) -> tuple[Tensor, Extra]:
        # in training, the last layer only computes these tokens; an evaluation may change all (changed_hidden_states)
        if only is None or not self.training or return_all_hiddens:
            return super().features_to_project(src_tokens, only, return_all_hiddens, has_padding)
        output = self.sentence_encoder(src_tokens, has_padding=has_padding, only=only)
        return hidden_states_in(output)[0].squeeze(0), {"inner_states": None}


@register_model("mlsm_modern")
class MlsmModernModel(LatentHeadModel):
    """A ModernBERT with a latent head."""

    encoder_class = ModernEncoder

    def finish_parameters(self) -> None:
        if safe_getattr(self.args, "initialization", BY_BERT) == BY_WIDTH:  # older checkpoints do not have it
            sentence_encoder(self).draw_weights_by_width()
            with torch.no_grad():  # from the start, a hidden state that holds a token's embedding predicts this token
                lm_head(self).dense.weight.add_(torch.eye(self.args.encoder_embed_dim))
        else:
            sentence_encoder(self).scale_down_residual_projections()

    initialization = BY_BERT
    ffn_name = "GeGLU"
    ffn_width = "8/3 of the width, as many parameters as 4x MLP"  # by default
    whole_options: ClassVar = {  # options with whole numbers
        "attention-window": f"tokens that a local layer sees; 0: all layers are global (default: {DEFAULT_WINDOW} "
        f"from {POSITIONS_WITH_WINDOW} positions on, else 0)",
        "global-attention-every": "every N-th layer is global, the others are local (default: 3)",
    }
    real_options: ClassVar = {
        "rope-theta": "base of the rotary angles in global layers (default: 10000)",
        "local-rope-theta": "base of the rotary angles in local layers (default: 10000)",
    }

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of the encoder and its heads, with the same names as in ``mlsm_roberta``."""
        whole = {
            "encoder-layers": "number of layers",
            "encoder-embed-dim": "width of the hidden states",
            "encoder-ffn-embed-dim": f"width of the {cls.ffn_name} (default: {cls.ffn_width})",
            "encoder-attention-heads": "number of attention heads (default: one for every 64 of the width)",
            "max-positions": "longest sample in tokens (default: --tokens-per-sample)",
            **cls.whole_options,
        }
        for name, text in whole.items():
            parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
        shares = {
            "dropout": "dropout of the embeddings and of what each block adds (default: 0)",
            "attention-dropout": "dropout of the attention weights (default: 0)",
            "activation-dropout": f"dropout in the {cls.ffn_name} (default: 0)",
            "pooler-dropout": "dropout in the head of a fine-tuned model (default: 0)",
            **cls.real_options,
        }
        for name, text in shares.items():
            parser.add_argument(f"--{name}", type=float, metavar="X", help=text)
        parser.add_argument(
            "--initialization",
            choices=[BY_BERT, BY_WIDTH],
            help="how the layers' weights are initialized. bert: with a standard deviation of 0.02. width: of 1 / "
            "sqrt(width), and the LM head's dense layer starts near the identity; learns faster (default: "
            f"{cls.initialization})",
        )
        text = "activation in the head of a fine-tuned model (default: tanh)"
        parser.add_argument("--pooler-activation-fn", choices=get_available_activation_fns(), help=text)
        parser.add_argument(
            "--load-checkpoint-heads", action="store_true", help="load the heads of a fine-tuned checkpoint"
        )
        LatentHeadModel.add_atoms_option(parser)


def size_of(args: FairseqDataclass, num_symbols: int, padding: int) -> ModernSize:
    """The encoder's size from the options; sets a missing window. ValueError if an option is out of range."""
    dim = args.encoder_embed_dim
    heads = args.encoder_attention_heads
    if heads < 1 or dim % (2 * heads):
        raise ValueError(f"--encoder-embed-dim {dim} is not a multiple of 2 x --encoder-attention-heads {heads}")
    if args.global_attention_every < 1:
        raise ValueError(f"--global-attention-every must be at least 1, got {args.global_attention_every}")
    if args.attention_window is None:  # the checkpoint keeps it
        args.attention_window = DEFAULT_WINDOW if args.max_positions >= POSITIONS_WITH_WINDOW else 0
    window = args.attention_window
    if window < 0 or window % 2:
        raise ValueError(f"--attention-window must be even and not negative, got {window}")
    return ModernSize(
        num_symbols=num_symbols,
        padding=padding,
        layers=args.encoder_layers,
        dim=dim,
        ffn_dim=args.encoder_ffn_embed_dim,
        heads=heads,
        dropout=args.dropout,
        attention_dropout=args.attention_dropout,
        activation_dropout=args.activation_dropout,
        window=window,
        global_every=args.global_attention_every,
        theta=args.rope_theta,
        local_theta=args.local_rope_theta,
    )


def architecture(args: FairseqDataclass, layers: int, dim: int) -> None:
    """Set options that have no value yet; ``layers`` and ``dim`` are the default size."""
    set_missing(args, encoder_layers=layers, encoder_embed_dim=dim)
    dim = args.encoder_embed_dim
    set_missing(args, encoder_ffn_embed_dim=geglu_dim(dim), encoder_attention_heads=max(1, dim // 64))
    set_missing(args, dropout=0.0, attention_dropout=0.0, initialization=BY_BERT, num_atoms=None)
    set_missing(args, attention_window=None, global_attention_every=3, rope_theta=10_000.0, local_rope_theta=10_000.0)
    base_architecture(args)


register_sizes("mlsm_modern", architecture, ARCHITECTURE_SIZES)
