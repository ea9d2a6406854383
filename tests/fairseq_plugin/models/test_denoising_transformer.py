"""The sizes of encoder-decoders for span denoising."""

from __future__ import annotations

import argparse

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel

from mlsm_plugin.fairseq_plugin.models.mlsm_roberta import denoising_base, denoising_small


def sizes(args: argparse.Namespace, side: str) -> tuple[int, int, int, int]:
    names = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
    return tuple(getattr(args, f"{side}_{name}") for name in names)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("arch", "function", "expected"),
    [("denoising_small", denoising_small, (6, 512, 2048, 8)), ("denoising_base", denoising_base, (12, 768, 3072, 12))],
)
def test_architectures_have_the_documented_sizes(arch: str, function: object, expected: tuple[int, ...]) -> None:
    args = argparse.Namespace()
    assert ARCH_CONFIG_REGISTRY[arch] is function
    assert ARCH_MODEL_REGISTRY[arch] is TransformerModel
    ARCH_CONFIG_REGISTRY[arch](args)
    assert sizes(args, "encoder") == sizes(args, "decoder") == expected
    assert args.encoder_normalize_before
    assert args.decoder_normalize_before
    assert args.encoder_learned_pos
    assert args.decoder_learned_pos
    assert args.share_all_embeddings
    assert args.activation_fn == "gelu"


def test_decoder_follows_the_encoder_and_options_override_both() -> None:
    args = argparse.Namespace(encoder_layers=3, encoder_embed_dim=64, encoder_attention_heads=4, activation_fn="relu")
    denoising_small(args)
    assert sizes(args, "encoder") == sizes(args, "decoder") == (3, 64, 256, 4)
    assert args.activation_fn == "relu"
    args = argparse.Namespace(decoder_layers=1, decoder_attention_heads=2, encoder_normalize_before=False)
    denoising_small(args)
    assert sizes(args, "decoder") == (1, 512, 2048, 2)
    assert (args.encoder_layers, args.encoder_normalize_before) == (6, False)
