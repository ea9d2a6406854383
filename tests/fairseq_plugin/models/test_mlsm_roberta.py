"""RoBERTa with a latent head: its sizes, and that all but the head is fairseq's RoBERTa."""

from __future__ import annotations

import argparse
import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from mlsm_plugin.fairseq_plugin.compat.model_parts import ATOM_PROJECTION
from mlsm_plugin.fairseq_plugin.models.mlsm_roberta import MlsmRobertaModel
from tests.tiny_run import seeded_model, training_config

HEAD = {f"{ATOM_PROJECTION}weight", f"{ATOM_PROJECTION}bias"}


@pytest.fixture(scope="module")
def run(pipeline):
    cfg = training_config(pipeline.data_bin)
    return SimpleNamespace(data=pipeline.data_bin, cfg=cfg, task=tasks.setup_task(cfg.task))


@pytest.mark.parametrize(
    ("arch", "layers", "dim", "heads"),
    [
        ("mlsm_roberta", 12, 768, 12),
        ("mlsm_roberta_tiny", 2, 128, 2),
        ("mlsm_roberta_small", 4, 512, 8),
        ("mlsm_roberta_medium", 8, 512, 8),
        ("mlsm_roberta_base", 12, 768, 12),
        ("mlsm_roberta_large", 24, 1024, 16),
    ],
)
def test_architectures_have_the_documented_sizes(arch, layers, dim, heads):
    args = argparse.Namespace()
    ARCH_CONFIG_REGISTRY[arch](args)
    assert ARCH_MODEL_REGISTRY[arch] is MlsmRobertaModel
    assert (args.encoder_layers, args.encoder_embed_dim, args.encoder_attention_heads) == (layers, dim, heads)
    assert args.encoder_ffn_embed_dim == 4 * dim
    assert args.num_atoms is None


def test_options_override_the_size_of_an_architecture():
    args = argparse.Namespace(encoder_embed_dim=256, encoder_layers=3, num_atoms=7)
    ARCH_CONFIG_REGISTRY["mlsm_roberta_small"](args)
    assert (args.encoder_layers, args.encoder_embed_dim, args.num_atoms) == (3, 256, 7)
    assert (args.encoder_ffn_embed_dim, args.encoder_attention_heads) == (1024, 4)


@pytest.mark.parametrize("flags", [(), ("--untie-weights-roberta",), ("--encoder-normalize-before",)])
def test_all_other_parameters_start_as_those_of_roberta(run, flags):
    ours = seeded_model(training_config(run.data, *flags), run.task).state_dict()
    stock_cfg = training_config(run.data, *flags, arch="roberta", task="masked_lm", criterion="masked_lm")
    stock = seeded_model(stock_cfg, tasks.setup_task(stock_cfg.task)).state_dict()
    assert set(ours) == set(stock) | HEAD
    for name, value in stock.items():
        assert torch.equal(ours[name], value), name
    weight, bias = ours[f"{ATOM_PROJECTION}weight"], ours[f"{ATOM_PROJECTION}bias"]
    assert not bias.any()
    assert 0.015 < weight.std() < 0.025  # as BERT initializes


def test_position_embeddings_cover_the_samples_and_not_less(run):
    args = copy.deepcopy(run.cfg.model)
    args.max_positions = None
    model = MlsmRobertaModel.build_model(args, run.task)
    assert model.max_positions() == 64  # --tokens-per-sample
    assert model.encoder.sentence_encoder.embed_positions.num_embeddings >= 64 + 2
