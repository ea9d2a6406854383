"""SAEs of SAELens: their latents, their older files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlsm_plugin.core.sparse_coding.formats.saelens import read_saelens
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from tests.core.sparse_coding.formats.foreign_saes import (
    DIM,
    LATENTS,
    hidden_states,
    saelens_arrays,
    saelens_config,
    saelens_oracle,
    write_saelens,
    write_tensors,
)

ARCHITECTURES = ("standard", "topk", "jumprelu", "gated", "batchtopk")
NORMS = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm")


def check_equal(coder: SaeCoder, wanted: tuple[np.ndarray, np.ndarray], hidden: np.ndarray) -> None:
    codes = coder.encode(hidden).codes
    assert 0 < codes.nnz < codes.shape[0] * codes.shape[1]
    assert np.allclose(codes.toarray(), wanted[0], atol=1e-5, rtol=1e-5)
    assert np.allclose(coder.reconstruct(hidden, codes), wanted[1], atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    norm=st.sampled_from(NORMS),
    apply=st.booleans(),
    rescale=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    seed=st.integers(0, 100),
)
def test_latents_are_those_of_the_formulas(
    architecture: str, norm: str, apply: bool, rescale: bool, dtype: torch.dtype, seed: int, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"normalize_activations": norm, "apply_b_dec_to_input": apply}
    if architecture in ("topk", "batchtopk"):
        more["rescale_acts_by_decoder_norm"] = rescale
    config = saelens_config(architecture, **more)
    own = write_saelens(tmp_path, config, saelens_arrays(architecture, seed), dtype)
    hidden = hidden_states(seed=seed)
    coder = read_saelens(tmp_path)
    check_equal(coder, saelens_oracle(config, own, hidden), hidden)
    assert coder.sae.weights.encoder.dtype == torch.float32


def test_where_an_sae_comes_from_is_kept(tmp_path: Path) -> None:
    metadata = {"sae_lens_version": "6.1.0", "model_name": "gpt2", "hook_name": "blocks.3.hook_resid_post"}
    more = {"prepend_bos": True, "hook_head_index": None, "dataset_path": "x" * 2000, "unheard_of": 1}
    write_saelens(tmp_path, saelens_config("jumprelu", metadata={**metadata, **more}))
    coder = read_saelens(tmp_path)
    assert coder.meta["imported_from"] == {
        **{"format": "saelens", "architecture": "jumprelu", "prepend_bos": True},
        **metadata,
    }
    assert (coder.meta["n_atoms"], coder.meta["dim"]) == (LATENTS, DIM)


FLAT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # what an old file says, and what it means
    "without a version": ({"use_ghost_grads": False, "lr": 4e-4, "hook_point": "blocks.0.hook_resid_pre"}, {}),
    "topk as an activation": (
        {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}, "architecture": "standard"},
        {"architecture": "topk", "k": 3},
    ),
    "topk of version 5": (
        {"architecture": "topk", "activation_fn": "topk", "activation_fn_kwargs": {"k": 3}, "hook_name": "a"},
        {"k": 3},
    ),
    "normalization that is false": ({"normalize_activations": False, "apply_b_dec_to_input": False}, {}),
    "normalization that is true": ({"normalize_activations": True}, {}),
    "normalization that is null": ({"normalize_activations": None, "activation_fn_kwargs": None}, {}),
    "constant norm": ({"normalize_activations": "constant_norm_rescale", "sae_lens_version": "5.11.0"}, {}),
    "gated": ({"architecture": "gated", "finetuning_scaling_factor": False, "sae_lens_training_version": "4.0.1"}, {}),
    "not scaled": ({"finetuning_scaling_factor": None, "dtype": "torch.float32", "seqpos_slice": [None]}, {}),
}


@pytest.mark.parametrize("name", FLAT)
def test_older_files(name: str, tmp_path: Path) -> None:
    found, meant = FLAT[name]
    flat = {"d_in": DIM, "d_sae": LATENTS, "model_name": "gpt2-small", **found}
    understood = {"architecture": "standard", "apply_b_dec_to_input": True, **flat, **meant}
    norm = understood.get("normalize_activations")
    understood["normalize_activations"] = norm if isinstance(norm, str) else "none"
    arrays = saelens_arrays(understood["architecture"])
    own = write_saelens(tmp_path, flat, {**arrays, "scaling_factor": np.ones(LATENTS, np.float32)})
    coder, hidden = read_saelens(tmp_path), hidden_states()
    check_equal(coder, saelens_oracle(understood, own, hidden), hidden)
    assert coder.meta["imported_from"]["model_name"] == "gpt2-small"


def test_older_jump_relu_with_the_logarithm_of_its_threshold(tmp_path: Path) -> None:
    config = saelens_config("jumprelu")
    arrays = saelens_arrays("jumprelu")
    threshold = np.abs(arrays.pop("threshold"))
    write_saelens(tmp_path, config, {**arrays, "log_threshold": np.log(threshold)})
    hidden = hidden_states()
    check_equal(read_saelens(tmp_path), saelens_oracle(config, {**arrays, "threshold": threshold}, hidden), hidden)


def test_a_training_file_says_how_it_was_trained(tmp_path: Path) -> None:
    training = {"l1_coefficient": 1.0, "lp_norm": 1.0, "l1_warm_up_steps": 0, "decoder_init_norm": 0.1}
    write_saelens(tmp_path, saelens_config("standard", **training))
    (tmp_path / "activation_scaler.json").write_text('{"scaling_factor": null, "has_whitening": false}')
    assert read_saelens(tmp_path).num_atoms == LATENTS


def flat(**more: Any) -> dict[str, Any]:
    return {"architecture": "standard", "d_in": DIM, "d_sae": LATENTS, **more}


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (saelens_config("standard", negative_slope=0.1), "does not know .'negative_slope'"),
    "k of a standard SAE": (saelens_config("standard", k=3), "does not know .'k'"),
    "old key in a new file": (saelens_config("standard", activation_fn="tanh-relu"), "does not know .'activation_fn'"),
    "transcoder": (saelens_config("standard") | {"architecture": "transcoder"}, "transcoder is refused: a transcoder"),
    "abstopk": (saelens_config("topk") | {"architecture": "abstopk"}, "can be negative"),
    "temporal": (saelens_config("topk") | {"architecture": "temporal"}, "depend on other tokens"),
    "matching pursuit": (saelens_config("topk") | {"architecture": "matching_pursuit"}, "from an iteration"),
    "unknown architecture": (saelens_config("topk") | {"architecture": "mystery"}, "'mystery' is unknown"),
    "architecture that is a list": (saelens_config("topk") | {"architecture": ["topk"]}, "architecture: .* not text"),
    "no architecture": (without(saelens_config("standard"), "architecture"), "lacks 'architecture'"),
    "other output": (
        saelens_config("standard", metadata={"sae_lens_version": "6.0.0", "hook_name": "a", "hook_name_out": "b"}),
        "hook_name_out: a transcoder",
    ),
    "attention heads": (saelens_config("standard", reshape_activations="hook_z"), "reshape_activations: 'hook_z'"),
    "attention heads, old": (flat(hook_name="blocks.0.attn.hook_z"), "reshape_activations: 'hook_z'"),
    "whitening": (saelens_config("standard", normalize_activations="covariance_whitening"), "save_inference_model"),
    "unknown normalization": (saelens_config("standard", normalize_activations="batch"), '"batch" is not one of'),
    "normalization that is a number": (saelens_config("standard", normalize_activations=1), "1 is not one of"),
    "new normalization that is false": (saelens_config("standard", normalize_activations=False), "false is not one of"),
    "rescaled standard": (saelens_config("standard", rescale_acts_by_decoder_norm=True), "rescale_acts.*true is not"),
    "batchtopk that does not say": (
        without(saelens_config("batchtopk"), "rescale_acts_by_decoder_norm"),
        "lacks 'rescale_acts_by_decoder_norm'",
    ),
    "negative k": (saelens_config("topk", k=-4), "k: -4 is not a whole number from 1"),
    "negative mean k": (saelens_config("batchtopk", k=-0.5), "k: -0.5 is not above 0"),
    "k that is a fraction": (saelens_config("topk", k=2.5), "k: 2.5 is not a whole number"),
    "k above the latents": (saelens_config("topk", k=1000), "only 20 latents"),
    "no k": (without(saelens_config("topk"), "k"), "lacks 'k'"),
    "two values of k": (flat(activation_fn="topk", activation_fn_kwargs={"k": 3}, k=4), "k is 4, but 3"),
    "tanh": (flat(activation_fn_str="tanh-relu"), '"tanh-relu" is not one of "relu", "topk"'),
    "gated topk": (flat(activation_fn_str="topk") | {"architecture": "gated"}, "topk does not belong"),
    "signed topk": (
        flat(activation_fn="topk", activation_fn_kwargs={"k": 3, "signed": True}),
        "does not know .'signed'",
    ),
    "two activations": (flat(activation_fn="relu", activation_fn_str="topk"), "contradict each other"),
    "kwargs that are a list": (flat(activation_fn_kwargs=[3]), "activation_fn_kwargs: it is not a dictionary"),
    "fine-tuned": (flat(finetuning_scaling_factor=True), "finetuning_scaling_factor is refused"),
    "version that is none": (saelens_config("standard", metadata={"sae_lens_version": "new"}), "not a version"),
    "metadata that is a list": (saelens_config("standard", metadata=[1]), "metadata: it is not a dictionary"),
    "b_dec that is text": (saelens_config("standard", apply_b_dec_to_input="no"), '"no" is neither true nor false'),
    "other width": (saelens_config("standard", d_in=7), r"the encoder is \(20, 6\) .*, but the settings say \(20, 7\)"),
    "2^60 latents": (saelens_config("standard", d_sae=1 << 60), "d_sae: .* is not a whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str, tmp_path: Path) -> None:
    config, problem = REFUSED[name]
    known = config.get("architecture") in ARCHITECTURES
    write_saelens(tmp_path, config, saelens_arrays(config["architecture"] if known else "standard"))
    check_refused(tmp_path, problem)


def check_refused(folder: Path, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        read_saelens(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def replaced(**arrays: np.ndarray | None) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        architecture = json.loads((folder / "cfg.json").read_text())["architecture"]
        changed = {**saelens_arrays(architecture), **arrays}
        kept = {name: value for name, value in changed.items() if value is not None}
        write_tensors(folder / "sae_weights.safetensors", kept)

    return change


NAN = np.full(LATENTS, np.nan, np.float32)
TENSORS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("standard", replaced(W_dec=None), "lacks the tensor W_dec"),
    "missing threshold": ("jumprelu", replaced(threshold=None), "lacks the tensor threshold"),
    "no global threshold": ("batchtopk", replaced(topk_threshold=None), "neither topk_threshold nor threshold"),
    "too many": ("standard", replaced(threshold=NAN), "do not belong to this kind of SAE: threshold"),
    "b_enc of a gated SAE": ("gated", replaced(b_enc=NAN), "do not belong to this kind of SAE: b_enc"),
    "NaN": ("standard", replaced(b_enc=NAN), "encoder_bias holds NaN"),
    "transposed": ("standard", replaced(W_enc=np.zeros((LATENTS, DIM), np.float32)), r"the encoder is \(6, 20\)"),
    "flat": ("standard", replaced(W_enc=np.zeros(9, np.float32)), "must have 2 dimensions"),
    "short bias": ("standard", replaced(b_enc=np.zeros(3, np.float32)), "encoder_bias has the shape"),
    "integers": ("standard", replaced(b_enc=np.zeros(LATENTS, np.int64)), "not floating-point"),
    "thresholds where one belongs": ("batchtopk", replaced(topk_threshold=NAN), "must be a single number"),
    "fine-tuned": ("standard", replaced(scaling_factor=np.full(LATENTS, 2, np.float32)), "scaling_factor is not 1"),
    "scaled while it was trained": (
        "standard",
        lambda folder: (folder / "activation_scaler.json").write_text('{"scaling_factor": 0.3}'),
        "inputs were scaled",
    ),
    "whitened while it was trained": (
        "standard",
        lambda folder: (folder / "activation_scaler.json").write_text('{"scaling_factor": null, "has_whitening": 1}'),
        "inputs were scaled",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(name: str, tmp_path: Path) -> None:
    architecture, change, problem = TENSORS[name]
    write_saelens(tmp_path, saelens_config(architecture))
    change(tmp_path)
    check_refused(tmp_path, problem)


def test_a_batchtopk_sae_may_have_a_threshold_for_each_latent(tmp_path: Path) -> None:
    arrays = saelens_arrays("batchtopk")
    arrays["threshold"] = np.full(LATENTS, arrays.pop("topk_threshold"))
    config = saelens_config("batchtopk")
    write_saelens(tmp_path, config, arrays)
    hidden = hidden_states()
    wanted = saelens_oracle({**config, "architecture": "jumprelu"}, arrays, hidden)
    check_equal(read_saelens(tmp_path), wanted, hidden)
