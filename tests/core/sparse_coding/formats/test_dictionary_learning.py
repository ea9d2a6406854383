"""SAEs of dictionary_learning: their latents, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.core.sparse_coding.formats.dictionary_learning import CLASSES, read_dictionary_learning
from tests.core.sparse_coding.formats import foreign_saes
from tests.core.sparse_coding.formats.foreign_saes import (
    DIM,
    LATENTS,
    K,
    dictionary_learning_state,
    hidden_states,
    write_dictionary_learning,
)


def oracle(name: str, state: dict[str, torch.Tensor], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Latents and reconstructions by the formulas of each class, in float64."""
    own = {key: value.double().numpy() for key, value in state.items()}
    bias = own[{"AutoEncoder": "bias", "GatedAutoEncoder": "decoder_bias"}.get(name, "b_dec")]
    encoder = own["W_enc"].T if "W_enc" in own else own["encoder.weight"]
    atoms = own["W_dec"] if "W_dec" in own else own["decoder.weight"].T
    x = hidden.astype(np.float64) - (0 if name == "JumpReluAutoEncoder" else bias)
    products = x @ encoder.T
    if name == "GatedAutoEncoder":
        latents = np.maximum(np.exp(own["r_mag"]) * products + own["mag_bias"], 0) * (products + own["gate_bias"] > 0)
        return latents, latents @ atoms + bias
    pre = products + own["b_enc" if "b_enc" in own else "encoder.bias"]
    latents = np.maximum(pre, 0)
    if name == "JumpReluAutoEncoder":
        latents[pre <= own["threshold"]] = 0
    elif name == "AutoEncoderTopK":
        for row in latents:
            row[np.argsort(-row)[K:]] = 0
    elif name != "AutoEncoder":
        latents[latents <= own["threshold"]] = 0
    reconstructions = latents @ atoms + bias
    if name == "AutoEncoder":  # the library scales the decoder to unit norm
        latents = latents * np.linalg.norm(atoms, axis=1)
    return latents, reconstructions


@pytest.mark.parametrize("name", CLASSES)
def test_latents_are_those_of_the_formulas(name: str, tmp_path: Path) -> None:
    state = write_dictionary_learning(tmp_path, name, dict_size=LATENTS, activation_dim=DIM)
    coder, hidden = read_dictionary_learning(tmp_path), hidden_states()
    latents, reconstructions = oracle(name, state, hidden)
    codes = coder.encode(hidden).codes
    assert 0 < codes.nnz < latents.size
    assert np.allclose(codes.toarray(), latents, atol=1e-5)
    assert np.allclose(coder.reconstruct(hidden, codes), reconstructions, atol=1e-5)
    facts = {"lm_name": "gpt2", "layer": 3, "trainer_class": "Trainer"}
    assert coder.meta["imported_from"] == {"format": "dictionary_learning", "architecture": name, **facts}


def test_a_decoder_of_unit_norm_stays_as_it_is(tmp_path: Path) -> None:
    state = dictionary_learning_state("AutoEncoder")
    state["decoder.weight"] /= state["decoder.weight"].norm(dim=0)
    write_dictionary_learning(tmp_path, "AutoEncoder", state)
    assert torch.equal(read_dictionary_learning(tmp_path).sae.weights.encoder, state["encoder.weight"])


def test_a_threshold_that_was_never_learned_lets_every_positive_latent_pass(tmp_path: Path) -> None:
    state = {**dictionary_learning_state("BatchTopKSAE"), "threshold": torch.tensor(-1.0)}
    write_dictionary_learning(tmp_path, "BatchTopKSAE", state)
    coder, hidden = read_dictionary_learning(tmp_path), hidden_states()
    assert np.allclose(coder.encode(hidden).codes.toarray(), oracle("BatchTopKSAE", state, hidden)[0], atol=1e-5)


def test_half_precision_and_parameters(tmp_path: Path) -> None:
    state = {key: torch.nn.Parameter(value.half()) for key, value in dictionary_learning_state("AutoEncoder").items()}
    write_dictionary_learning(tmp_path, "AutoEncoder", state)
    weights = read_dictionary_learning(tmp_path).sae.weights
    assert weights.encoder.dtype == torch.float32
    assert not weights.encoder.requires_grad


@pytest.mark.parametrize(
    ("name", "settings", "tensors", "problem"),
    [
        ("AutoEncoder", {"dict_class": "AutoEncoderNew"}, {}, "'AutoEncoderNew' is refused; known are AutoEncoder,"),
        ("AutoEncoder", {"dict_class": 3}, {}, "dict_class: 3 is not text"),
        ("AutoEncoder", {"negative_slope": 1}, {}, "does not know .'negative_slope'"),
        ("AutoEncoderTopK", {"k": -4}, {}, "k: -4 is not a whole number"),
        ("AutoEncoderTopK", {"k": 5}, {}, "ae.pt says k 4, but config.json says 5"),
        ("AutoEncoderTopK", {"k": 99}, {"k": torch.tensor(99)}, "only 20 latents"),
        ("AutoEncoder", {"dict_size": 7}, {}, r"the encoder is \(20, 6\) .*, but the settings say \(7, 6\)"),
        ("AutoEncoder", {}, {"bias": None}, "lacks the tensor bias"),
        ("AutoEncoder", {}, {"extra": torch.zeros(2)}, "do not belong to this kind of SAE: extra"),
        ("AutoEncoder", {}, {"bias": torch.full((DIM,), float("nan"))}, "decoder_bias holds NaN"),
        ("AutoEncoder", {}, {"decoder.weight": torch.full((DIM, LATENTS), float("nan"))}, "decoder holds NaN"),
        ("AutoEncoder", {}, {"decoder.weight": torch.zeros(DIM, LATENTS)}, "column of zeros"),
        (
            "AutoEncoder",
            {},
            {"decoder.weight": torch.ones(DIM, 3)},
            r"decoder has the shape \(3, 6\), but must have \(20, 6\)",
        ),
        ("AutoEncoder", {}, {"encoder.weight": torch.zeros(LATENTS)}, "must have 2 dimensions"),
        ("GatedAutoEncoder", {}, {"r_mag": torch.zeros(3)}, "gate_scale has the shape"),
        ("BatchTopKSAE", {}, {"threshold": None}, "lacks the tensor threshold"),
        ("BatchTopKSAE", {}, {"threshold": torch.zeros(2)}, "must be a single number"),
        ("MatryoshkaBatchTopKSAE", {}, {"threshold": torch.tensor(float("nan"))}, "threshold holds NaN"),
    ],
)
def test_what_is_refused_and_why(
    name: str, settings: dict[str, Any], tensors: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    changed = {**dictionary_learning_state(name), **tensors}
    kept = {key: value for key, value in changed.items() if value is not None}
    write_dictionary_learning(tmp_path, name, kept, **settings)
    with pytest.raises(ValueError, match=problem) as caught:
        read_dictionary_learning(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_rest_of_the_configuration(tmp_path: Path) -> None:
    write_dictionary_learning(tmp_path, "AutoEncoderTopK")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "buffer": {"io": "in_and_out"}}))
    with pytest.raises(ValueError, match="it is a transcoder"):
        read_dictionary_learning(tmp_path)
    path.write_text(json.dumps({"trainer": {**config["trainer"], "k": None}}))
    with pytest.raises(ValueError, match="k: None is not a whole number"):
        read_dictionary_learning(tmp_path)
    path.write_text(json.dumps({"trainer": {"dict_class": "AutoEncoderTopK"}}))
    with pytest.raises(ValueError, match=r"config\.json lacks k"):
        read_dictionary_learning(tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="lacks 'dict_class'"):
        read_dictionary_learning(tmp_path)


def test_every_class_of_the_fixtures_is_known() -> None:
    assert set(foreign_saes.CLASSES) == set(CLASSES)
