"""Reconstructions and losses on a split: slow loops as the oracle, a perfect SAE, and one that reconstructs nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.core.hidden_states.sources import open_encoder
from mlsm_plugin.core.sparse_coding.quality import ReconstructionQuality
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions
from mlsm_plugin.evaluation.dictionary_quality import (
    EvaluationSettings,
    drawn_blocks,
    evaluate_loss,
    evaluate_reconstruction,
)
from mlsm_plugin.evaluation.masked_batches import MASKED_SHARE
from mlsm_plugin.evaluation.masked_lms import open_masked_lm
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from tests.core.sparse_coding.sae_weights import random_weights
from tests.tiny_models import TinyData

SETTINGS = EvaluationSettings(layer=1, blocks=BlockSettings(24), max_tokens=600, threads=1, batch_tokens=100)


@pytest.fixture(scope="module")
def reader(tiny: TinyData) -> BlockReader:
    return BlockReader(tiny.data_bin, "valid", SETTINGS.blocks)


def random_sae(dim: int = 32) -> SaeCoder:
    config = SaeConfig(activation="topk", k=6)
    return SaeCoder(SparseAutoencoder(config, random_weights(config, 64, dim)))


def perfect_sae(dim: int = 32, scale: float = 1.0) -> SaeCoder:
    """Codes the positive and the negative part of each dimension; the reconstruction is ``scale`` times the truth."""
    both = torch.cat([torch.eye(dim), -torch.eye(dim)])
    weights = SaeWeights(both, torch.zeros(2 * dim), scale * both, torch.zeros(dim))
    return SaeCoder(SparseAutoencoder(SaeConfig(), weights))


def slow_rows(tiny: TinyData, reader: BlockReader, settings: EvaluationSettings) -> np.ndarray:
    """Hidden states of content tokens, one block after the other."""
    encoder = open_encoder(tiny.model, tiny.data_bin, layer=settings.layer, device="cpu")
    rows = []
    for number in drawn_blocks(reader, settings):
        for block in reader.block(int(number)):
            states = encoder.hidden_states(block.tokens[None])[0]
            rows += [state.numpy() for state, token in zip(states, block.tokens, strict=True) if int(token) > 2]
    return np.stack(rows)


def slow_losses(tiny: TinyData, reader: BlockReader, coder: SaeCoder, settings: EvaluationSettings) -> dict[str, float]:
    """The three losses, one block and one replaced token at a time, by a forward pass that is written out."""
    from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import load_roberta
    from mlsm_plugin.fairseq_plugin.compat import model_parts

    model = load_roberta(tiny.model, tiny.data_bin, reader.dictionary)[0].eval()
    encoder = model_parts.sentence_encoder(model)
    losses: dict[str, list[float]] = {"without_sae": [], "with_sae": [], "with_ablation": []}
    for number in drawn_blocks(reader, settings):
        for block in reader.block(int(number)):
            chosen = covered_positions(block.positions.numpy(), coverage=MASKED_SHARE, seed=settings.seed)
            masked = torch.from_numpy(chosen) & (block.tokens > 2)
            inputs = torch.where(masked, reader.dictionary.index("<mask>"), block.tokens)
            for name, found in losses.items():
                hidden = encoder.forward_embedding(inputs[None])[0].transpose(0, 1)
                for layer in encoder.layers[: settings.layer]:
                    hidden = layer(hidden, encoder_padding_mask=None)
                for place, token in enumerate(block.tokens.tolist()):
                    if token > 2 and name != "without_sae":
                        state = hidden[place].clone()
                        hidden[place] = 0
                        if name == "with_sae":
                            hidden[place] = torch.from_numpy(coder.reconstruct(state, coder.encode(state).codes))
                for layer in encoder.layers[settings.layer :]:
                    hidden = layer(hidden, encoder_padding_mask=None)
                logits = model_parts.lm_head(model)(hidden[:, 0]).double().log_softmax(dim=1)
                found += [-float(logits[place, block.tokens[place]]) for place in torch.nonzero(masked).ravel()]
    means = {f"ce_loss_{name}": math.fsum(found) / len(found) for name, found in losses.items()}
    clean, with_sae, ablated = means.values()
    return {
        "masked_tokens": len(losses["with_sae"]), **means, "ce_loss_score": (ablated - with_sae) / (ablated - clean)
    }  # fmt: skip


@torch.no_grad()
@pytest.mark.slow
def test_figures_are_those_of_one_token_at_a_time(tiny: TinyData, reader: BlockReader) -> None:
    coder, encoder = random_sae(), open_encoder(tiny.model, tiny.data_bin, layer=1, device="cpu")
    found, inexact = evaluate_reconstruction(reader, encoder, coder, SETTINGS)
    rows = slow_rows(tiny, reader, SETTINGS)
    codes, quality = coder.encode(rows).codes, ReconstructionQuality(coder.num_atoms, coder.dim)
    quality.add(rows, codes, coder.reconstruct(rows, codes))
    assert found == pytest.approx(quality.result(), rel=1e-5)
    assert inexact == 0
    model = open_masked_lm(tiny.model, tiny.data_bin, device="cpu")
    for layer in (0, 1, 2):
        settings = replace(SETTINGS, layer=layer)
        losses = evaluate_loss(reader, model, coder, settings)
        assert losses == pytest.approx(slow_losses(tiny, reader, coder, settings), rel=1e-5, abs=1e-4)
        assert losses == pytest.approx(
            evaluate_loss(reader, model, coder, replace(settings, batch_tokens=600)), rel=1e-5
        )
    assert 0.1 < losses["masked_tokens"] / found["tokens"] < 0.2


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_perfect_sae_loses_nothing(tiny: TinyData, reader: BlockReader, layer: int) -> None:
    settings = replace(SETTINGS, layer=layer)
    encoder = open_encoder(tiny.model, tiny.data_bin, layer=layer, device="cpu")
    model = open_masked_lm(tiny.model, tiny.data_bin, device="cpu")
    figures, _ = evaluate_reconstruction(reader, encoder, perfect_sae(), settings)
    assert (figures["explained_variance"], figures["mse"]) == (1, 0)
    losses = evaluate_loss(reader, model, perfect_sae(), settings)
    assert losses["ce_loss_with_sae"] == pytest.approx(losses["ce_loss_without_sae"], abs=1e-6)
    assert abs(losses["ce_loss_with_ablation"] - losses["ce_loss_without_sae"]) > 1e-3
    assert losses["ce_loss_score"] == pytest.approx(1, abs=1e-3)
    nothing = evaluate_loss(reader, model, perfect_sae(scale=0.0), settings)
    assert nothing["ce_loss_with_sae"] == nothing["ce_loss_with_ablation"]
    assert nothing["ce_loss_score"] == 0


def test_drawn_blocks_are_whole_and_enough(reader: BlockReader) -> None:
    for wanted in (1, 100, 600):
        numbers = drawn_blocks(reader, replace(SETTINGS, max_tokens=wanted))
        size = int(reader.sizes[numbers].sum())
        assert wanted <= size < wanted + int(reader.sizes.max())
        assert (np.diff(numbers) > 0).all()
    everything = drawn_blocks(reader, replace(SETTINGS, max_tokens=10**9))
    assert everything.tolist() == list(range(len(reader)))
    first = drawn_blocks(reader, SETTINGS)
    assert first.tolist() == drawn_blocks(reader, SETTINGS).tolist()
    assert first.tolist() != drawn_blocks(reader, replace(SETTINGS, seed=2)).tolist()


def test_without_a_masked_token_there_is_no_loss(tiny: TinyData, reader: BlockReader, monkeypatch: Any) -> None:
    monkeypatch.setattr("mlsm_plugin.evaluation.masked_batches.MASKED_SHARE", 1e-9)
    model = open_masked_lm(tiny.model, tiny.data_bin, device="cpu")
    losses = evaluate_loss(reader, model, perfect_sae(), replace(SETTINGS, max_tokens=1))
    assert losses.pop("masked_tokens") == 0
    assert set(losses.values()) == {None}


def test_hidden_states_that_are_not_finite_are_refused(tiny: TinyData, reader: BlockReader, tmp_path: Path) -> None:
    state = torch.load(tiny.model, weights_only=True)
    name = next(name for name in state["model"] if name.endswith("layers.0.fc2.bias"))
    state["model"][name][:] = 3e38  # finite, as weights have to be
    (tmp_path / "dict.txt").write_bytes((tiny.data_bin / "dict.txt").read_bytes())
    torch.save(state, tmp_path / "checkpoint.pt")
    encoder = open_encoder(tmp_path / "checkpoint.pt", tiny.data_bin, layer=1, device="cpu")
    with pytest.raises(ValueError, match=r"token at position \d+ in layer 1 holds NaN or infinity; try without --fp16"):
        evaluate_reconstruction(reader, encoder, perfect_sae(), SETTINGS)
    model = open_masked_lm(tmp_path / "checkpoint.pt", tiny.data_bin, device="cpu")
    with pytest.raises(ValueError, match="the masked-LM loss is not finite"):
        evaluate_loss(reader, model, perfect_sae(), replace(SETTINGS, layer=0))
