"""What is written for SAELens: the same latents by its formulas, and the same SAE when it is read again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlsm_plugin.core.sparse_coding.formats.saelens import (
    ORIGIN,
    check_exportable,
    facts_of,
    for_saelens,
    read_saelens,
    write_saelens,
)
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import ACTIVATIONS, INPUT_NORMS, SaeConfig, SparseAutoencoder
from tests.core.sparse_coding.formats import foreign_saes
from tests.core.sparse_coding.formats.foreign_saes import DIM, LATENTS, hidden_states, saelens_config, saelens_oracle
from tests.core.sparse_coding.sae_weights import random_weights


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    activation=st.sampled_from(ACTIVATIONS),
    norm=st.sampled_from(INPUT_NORMS),
    subtract=st.booleans(),
    rescale=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_latents_and_reconstructions_are_the_same(
    activation: str, norm: str, subtract: bool, rescale: bool, seed: int, tmp_path: Path
) -> None:
    k, rescale = 3 if activation == "topk" else None, rescale and activation != "gated"
    config = SaeConfig(activation, k, subtract, norm, rescale)
    coder = SaeCoder(SparseAutoencoder(config, random_weights(config, LATENTS, DIM, seed)), {"layer": 2})
    exported = for_saelens(coder)
    write_saelens(exported, tmp_path)
    hidden = hidden_states(seed=seed)
    written, own = json.loads((tmp_path / "cfg.json").read_text()), load_file(tmp_path / "sae_weights.safetensors")
    assert own["W_enc"].shape == (DIM, LATENTS)
    wanted = saelens_oracle(written, {name: array.astype(np.float64) for name, array in own.items()}, hidden)
    codes = coder.encode(hidden).codes
    assert np.allclose(codes.toarray(), wanted[0], atol=1e-4, rtol=1e-5)
    assert np.allclose(coder.reconstruct(hidden, codes), wanted[1], atol=1e-3, rtol=1e-5)
    again = read_saelens(tmp_path)
    assert again.fingerprint == exported.fingerprint
    assert (again.fingerprint == coder.fingerprint) == (not rescale)


def test_what_saelens_said_of_the_model_comes_back(tmp_path: Path) -> None:
    foreign_saes.write_saelens(tmp_path / "in", saelens_config("topk", normalize_activations="layer_norm"))
    coder = read_saelens(tmp_path / "in")
    (tmp_path / "out").mkdir()
    write_saelens(for_saelens(coder), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "cfg.json").read_text())
    metadata = written.pop("metadata")
    assert {**written, "metadata": 0} == {
        **saelens_config("topk", normalize_activations="layer_norm", rescale_acts_by_decoder_norm=False),
        "metadata": 0,
    }
    assert (metadata["model_name"], metadata["hook_name"]) == ("gpt2", "blocks.3.hook_resid_post")
    assert metadata["sae_lens_version"] == "6.0.0"
    assert metadata["mlsm_plugin"]["layer"] is None
    assert read_saelens(tmp_path / "out").fingerprint == coder.fingerprint


def test_the_origin_of_an_sae_that_was_learned_here(tmp_path: Path) -> None:
    config = SaeConfig("topk", 3)
    sae = SparseAutoencoder(config, random_weights(config, LATENTS, DIM))
    meta = {"layer": 5, "auxiliary": "hf:organization/encoder", "text": "data-bin/train"}
    write_saelens(SaeCoder(sae, meta), tmp_path)
    metadata = json.loads((tmp_path / "cfg.json").read_text())["metadata"]
    origin = {"model_name": "organization/encoder", "hook_name": "hidden_states.5", "dataset_path": "data-bin/train"}
    assert {name: metadata[name] for name in ORIGIN} == origin
    assert {name: read_saelens(tmp_path).meta["imported_from"][name] for name in ORIGIN} == origin
    assert facts_of(SaeCoder(sae)) == {}
    imported = {"imported_from": {"format": "saelens", "model_name": "gpt2", "hook_name": None}}
    facts = facts_of(SaeCoder(sae, {**meta, **imported}))
    assert facts == {**origin, "model_name": "gpt2"}


def test_a_row_of_zeros_in_a_rescaled_decoder(tmp_path: Path) -> None:
    config = SaeConfig("jumprelu", rescale_by_decoder_norm=True)
    weights = random_weights(config, LATENTS, DIM)
    weights.decoder[3] = 0
    coder = SaeCoder(SparseAutoencoder(config, weights))
    write_saelens(for_saelens(coder), tmp_path)
    hidden = hidden_states()
    found = read_saelens(tmp_path).encode(hidden).codes.toarray()
    assert np.allclose(found, coder.encode(hidden).codes.toarray(), atol=1e-5)
    assert not found[:, 3].any()


def test_a_lasso_has_no_encoder() -> None:
    check_exportable(SaeCoder)
    with pytest.raises(ValueError, match=r"a coder of kind 'lasso' .* has no encoder"):
        check_exportable(LassoCoder)
