"""The modern encoder and DeBERTa's as fairseq models: sizes, options, initialization, checkpoints."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from mlsm_plugin.fairseq_plugin.models.mlsm_deberta import MlsmDebertaModel
from mlsm_plugin.fairseq_plugin.models.mlsm_modern import MlsmModernModel
from tests.tiny_models import TinyData, positions
from tests.tiny_run import seeded_model, training_config

DEBERTA = ("--arch", "mlsm_deberta_tiny")
MASKED_LM: Any = {"task": "masked_lm", "criterion": "masked_lm", "arch": "mlsm_modern_tiny"}


ARCHS = pytest.mark.parametrize("arch", ["mlsm_modern_tiny", "mlsm_deberta_tiny"])


def model_of(tiny: TinyData, *flags: object, seed: int = 1, arch: str = "mlsm_modern_tiny") -> Any:
    cfg = training_config(tiny.data_bin, *positions(24), *flags, **{**MASKED_LM, "arch": arch})
    return seeded_model(cfg, tasks.setup_task(cfg.task), seed)


@pytest.mark.parametrize(
    ("arch", "layers", "dim", "heads", "ffn"),
    [
        ("mlsm_modern", 12, 768, 12, 2048),
        ("mlsm_modern_tiny", 2, 128, 2, 352),
        ("mlsm_modern_small", 4, 512, 8, 1376),
        ("mlsm_modern_medium", 8, 512, 8, 1376),
        ("mlsm_modern_base", 12, 768, 12, 2048),
        ("mlsm_deberta_tiny", 2, 128, 2, 512),
        ("mlsm_deberta_small", 4, 512, 8, 2048),
        ("mlsm_deberta_medium", 8, 512, 8, 2048),
        ("mlsm_deberta_base", 12, 768, 12, 3072),
    ],
)
def test_architectures_have_the_documented_sizes(arch: str, layers: int, dim: int, heads: int, ffn: int) -> None:
    args = argparse.Namespace()
    ARCH_CONFIG_REGISTRY[arch](args)
    assert ARCH_MODEL_REGISTRY[arch] is (MlsmModernModel if "modern" in arch else MlsmDebertaModel)
    assert (args.encoder_layers, args.encoder_embed_dim, args.encoder_attention_heads) == (layers, dim, heads)
    assert args.encoder_ffn_embed_dim == ffn
    assert (args.dropout, args.attention_dropout, args.num_atoms) == (0.0, 0.0, None)
    assert args.initialization == ("bert" if "modern" in arch else "width")


def test_only_the_vocabulary_has_a_bias_and_embeddings_are_tied(tiny: TinyData) -> None:
    model = model_of(tiny)
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert biases == {"encoder.lm_head.bias"}
    assert model.encoder.lm_head.weight is model.encoder.sentence_encoder.embed_tokens.weight


@ARCHS
def test_residual_projections_start_smaller_with_depth(tiny: TinyData, arch: str) -> None:
    flags = ("--encoder-layers", 8, "--encoder-embed-dim", 128, "--initialization", "bert")
    encoder = model_of(tiny, *flags, arch=arch).encoder.sentence_encoder
    for layer in encoder.layers:
        for name in ("qkv_proj", "fc1"):
            assert getattr(layer, name).weight.std().item() == pytest.approx(0.02, rel=0.1)
        for name in ("out_proj", "fc2"):
            assert getattr(layer, name).weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.1)
    assert encoder.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)


@ARCHS
def test_weights_drawn_by_width_keep_the_variance_and_an_embedding_predicts_its_token(
    tiny: TinyData, arch: str
) -> None:
    flags = ("--encoder-layers", 8, "--encoder-embed-dim", 256, "--initialization", "width")
    model = model_of(tiny, *flags, arch=arch)
    encoder = model.encoder.sentence_encoder
    for layer in encoder.layers:
        for name in ("qkv_proj", "fc1"):
            assert getattr(layer, name).weight.std().item() == pytest.approx(1 / 16, rel=0.1)
        for name in ("out_proj", "fc2"):
            assert getattr(layer, name).weight.std().item() == pytest.approx(1 / 16 / math.sqrt(16), rel=0.1)
    by_bert = model_of(tiny, *flags[:-1], "bert", arch=arch).encoder
    for own, least, most in ((model.encoder, 0.99, 1.0), (by_bert, 0.0, 0.2)):
        embeddings = own.sentence_encoder.embed_tokens.weight
        logits = own.lm_head.token_logits(own.lm_head.transform(own.sentence_encoder.embedding_norm(embeddings)))
        types = torch.arange(4, len(embeddings))
        assert least <= (logits.argmax(dim=1)[types] == types).float().mean() <= most


@pytest.mark.parametrize(
    ("flags", "window", "local"),
    [
        (positions(24), 0, []),
        (positions(511), 0, []),
        (positions(512), 128, [1, 2, 4, 5]),
        ((*positions(24), "--attention-window", 8, "--global-attention-every", 2), 8, [1, 3, 5]),
        ((*positions(512), "--attention-window", 0), 0, []),
    ],
)
def test_layers_are_local_from_512_positions_on(
    tiny: TinyData, flags: tuple[object, ...], window: int, local: list[int]
) -> None:
    model = model_of(tiny, "--encoder-layers", 6, *flags)
    assert model.args.attention_window == window  # the checkpoint says it too
    layers = model.encoder.sentence_encoder.layers
    assert [number for number, layer in enumerate(layers) if layer.is_local] == local


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*DEBERTA, "--encoder-attention-heads", 3), "--encoder-embed-dim 32 is not a multiple of --encoder-attention"),
        ((*DEBERTA, "--position-buckets", 1), "--position-buckets must be 0 or at least 2, got 1"),
        ((*DEBERTA, "--position-buckets", -2), "--position-buckets must be 0 or at least 2, got -2"),
        (
            (*DEBERTA, "--max-relative-positions", 129),
            "--max-relative-positions must be at least 130 with --position-buckets 256, got 129",
        ),
        (
            ("--encoder-attention-heads", 3),
            "--encoder-embed-dim 32 is not a multiple of 2 x --encoder-attention-heads 3",
        ),
        (("--attention-window", 7), "--attention-window must be even and not negative, got 7"),
        (("--attention-window", -2), "--attention-window must be even and not negative, got -2"),
        (("--global-attention-every", 0), "--global-attention-every must be at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny: TinyData, flags: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(tiny, *flags)


@ARCHS
def test_autocast_gives_the_same_up_to_bfloat16(tiny: TinyData, arch: str) -> None:
    model = model_of(tiny, arch=arch)
    tokens = torch.randint(5, 100, (2, 9))
    expected = model(tokens)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)[0]
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


@ARCHS
def test_all_positions_can_be_used_and_more(tiny: TinyData, arch: str) -> None:
    model = model_of(tiny, arch=arch)
    assert model.max_positions() == 24
    assert model(torch.randint(5, 100, (1, 60)))[0].isfinite().all()


@ARCHS
@pytest.mark.parametrize("training", [True, False])
def test_masked_tokens_are_projected_as_in_the_whole_batch(tiny: TinyData, training: bool, arch: str) -> None:
    model = model_of(tiny, arch=arch).double().train(training)
    last = []
    model.encoder.sentence_encoder.layers[-1].fc1.register_forward_hook(lambda *given: last.append(given[2].shape[:-1]))
    tokens = torch.randint(5, 100, (3, 9))
    masked = torch.rand(3, 9) < 0.3
    expected = model(tokens)[0]
    torch.testing.assert_close(model(tokens, masked_tokens=masked)[0], expected[masked])
    assert last == [(3, 9), (int(masked.sum()),) if training else (3, 9)]
    assert model(tokens, masked_tokens=torch.zeros_like(masked))[0].shape == (0, expected.size(2))
    states = model(tokens, masked_tokens=masked, return_all_hiddens=True)[1]["inner_states"]
    assert [tuple(state.shape) for state in states] == [(9, 3, 32)] * 3
