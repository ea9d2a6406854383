"""The sizes of RoBERTa encoders for TACO."""

from __future__ import annotations

import argparse

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel

from mlsm_plugin.fairseq_plugin.models.mlsm_roberta import taco_base, taco_small


@pytest.mark.parametrize(
    ("arch", "function", "expected"),
    [("taco_small", taco_small, (4, 512, 2048, 8)), ("taco_base", taco_base, (12, 768, 3072, 12))],
)
def test_architectures_have_the_documented_sizes(arch: str, function: object, expected: tuple[int, ...]) -> None:
    args = argparse.Namespace()
    assert ARCH_CONFIG_REGISTRY[arch] is function
    assert ARCH_MODEL_REGISTRY[arch] is RobertaModel
    ARCH_CONFIG_REGISTRY[arch](args)
    found = (args.encoder_layers, args.encoder_embed_dim, args.encoder_ffn_embed_dim, args.encoder_attention_heads)
    assert found == expected
    assert (args.activation_fn, args.dropout) == ("gelu", 0.1)  # what RoBERTa has


def test_options_override_the_size() -> None:
    args = argparse.Namespace(encoder_layers=2, encoder_attention_heads=4)
    taco_small(args)
    assert (args.encoder_layers, args.encoder_embed_dim, args.encoder_attention_heads) == (2, 512, 4)
