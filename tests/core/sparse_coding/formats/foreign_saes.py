"""Files of other programs with random SAEs, and what their latents are: formulas in float64 on numpy arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Arrays = dict[str, np.ndarray]
Both = tuple[np.ndarray, np.ndarray]
DIM, LATENTS = 6, 20
SAELENS_SHAPES = {
    "W_enc": (DIM, LATENTS),
    "W_dec": (LATENTS, DIM),
    "b_dec": (DIM,),
    **dict.fromkeys(("b_enc", "threshold", "b_gate", "r_mag", "b_mag"), (LATENTS,)),
}
ONLY_OF = {
    "gated": ("b_gate", "r_mag", "b_mag"),
    "jumprelu": ("b_enc", "threshold"),
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "batchtopk": ("b_enc",),
}


def hidden_states(rows: int = 40, seed: int = 3) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, DIM)) * 2 + 0.5).astype(np.float32)


def random_arrays(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: (rng.normal(size=shape) * 0.6).astype(np.float32) for name, shape in shapes.items()}


def write_tensors(path: Path, arrays: Arrays, dtype: torch.dtype = torch.float32) -> Arrays:
    """A safetensors file; returns the values that it holds after rounding, in float64. Whole numbers stay so."""
    made = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in made.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def saelens_config(architecture: str, **more: Any) -> dict[str, Any]:
    """A ``cfg.json`` of SAELens 6."""
    config = {
        "architecture": architecture,
        "d_in": DIM,
        "d_sae": LATENTS,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": "6.54.12", "model_name": "gpt2", "hook_name": "blocks.3.hook_resid_post"},
    }
    config |= {"topk": {"k": 4}, "batchtopk": {"k": 4.5, "rescale_acts_by_decoder_norm": False}}.get(architecture, {})
    return {**config, **more}


def saelens_arrays(architecture: str, seed: int = 0) -> Arrays:
    names = ("W_enc", "W_dec", "b_dec", *ONLY_OF[architecture])
    arrays = random_arrays({name: SAELENS_SHAPES[name] for name in names}, seed)
    return {**arrays, "topk_threshold": np.float32(0.6)} if architecture == "batchtopk" else arrays


def write_saelens(
    folder: Path, config: dict[str, Any], arrays: Arrays | None = None, dtype: torch.dtype = torch.float32
) -> Arrays:
    """The folder of an SAE; returns its weights in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(config))
    arrays = saelens_arrays(config["architecture"]) if arrays is None else arrays
    return write_tensors(folder / "sae_weights.safetensors", arrays, dtype)


def saelens_oracle(config: dict[str, Any], own: Arrays, hidden: np.ndarray) -> Both:
    """Latents and reconstructions of an SAE of SAELens, one hidden state at a time."""
    norms = np.array([np.sqrt((row**2).sum()) for row in own["W_dec"]])
    rescale = config.get("rescale_acts_by_decoder_norm", False)
    latents, reconstructions = [], []
    for x in hidden.astype(np.float64):
        scale, shift = 1.0, 0.0
        if config["normalize_activations"] == "constant_norm_rescale":
            scale = np.sqrt((x**2).sum()) / np.sqrt(len(x))
            z = x / scale
        elif config["normalize_activations"] == "layer_norm":
            shift, scale = x.mean(), np.sqrt(((x - x.mean()) ** 2).sum() / (len(x) - 1))
            z = (x - shift) / (scale + 1e-5)
        else:
            z = x
        z = z - own["b_dec"] if config["apply_b_dec_to_input"] else z
        products = np.array([(z * own["W_enc"][:, latent]).sum() for latent in range(own["W_enc"].shape[1])])
        if config["architecture"] == "gated":
            opened = products + own["b_gate"] > 0
            values = opened * np.maximum(products * np.exp(own["r_mag"]) + own["b_mag"], 0)
        else:
            pre = (products + own["b_enc"]) * (norms if rescale else 1)
            values = np.maximum(pre, 0)
            if config["architecture"] == "topk":
                values[np.argsort(-pre)[config["k"] :]] = 0
            elif config["architecture"] == "jumprelu":
                values[pre <= own["threshold"]] = 0
            elif config["architecture"] == "batchtopk":
                values[pre <= own["topk_threshold"]] = 0
        decoded = values / norms if rescale else values
        latents.append(values)
        reconstructions.append((decoded[:, None] * own["W_dec"]).sum(axis=0) * scale + own["b_dec"] * scale + shift)
    return np.array(latents), np.array(reconstructions)


def sparsify_arrays(seed: int = 0) -> Arrays:
    shapes = {"encoder.weight": (LATENTS, DIM), "encoder.bias": (LATENTS,), "W_dec": (LATENTS, DIM), "b_dec": (DIM,)}
    return random_arrays(shapes, seed)


SPARSIFY_CONFIG: dict[str, Any] = {
    "activation": "topk",
    "expansion_factor": 32,
    "normalize_decoder": True,
    "num_latents": LATENTS,
    "k": 4,
    "multi_topk": False,
    "skip_connection": False,
    "transcode": False,
    "d_in": DIM,
}


def write_sparsify(
    folder: Path, config: dict[str, Any] | None = None, arrays: Arrays | None = None, dtype: torch.dtype = torch.float32
) -> Arrays:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(SPARSIFY_CONFIG if config is None else config))
    return write_tensors(folder / "sae.safetensors", sparsify_arrays() if arrays is None else arrays, dtype)


LINEAR = {"encoder.weight": (LATENTS, DIM), "encoder.bias": (LATENTS,), "decoder.weight": (DIM, LATENTS)}
MATRICES = {"W_enc": (DIM, LATENTS), "b_enc": (LATENTS,), "W_dec": (LATENTS, DIM), "b_dec": (DIM,)}
GATES = {"r_mag": (LATENTS,), "gate_bias": (LATENTS,), "mag_bias": (LATENTS,), "decoder_bias": (DIM,)}
CLASSES: dict[str, dict[str, tuple[int, ...]]] = {
    "AutoEncoder": {**LINEAR, "bias": (DIM,)},
    "GatedAutoEncoder": {"encoder.weight": (LATENTS, DIM), "decoder.weight": (DIM, LATENTS), **GATES},
    "JumpReluAutoEncoder": {**MATRICES, "threshold": (LATENTS,)},
    "AutoEncoderTopK": {**LINEAR, "b_dec": (DIM,)},
    "BatchTopKSAE": {**LINEAR, "b_dec": (DIM,)},
    "MatryoshkaBatchTopKSAE": MATRICES,
}
K = 4


def dictionary_learning_state(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """What is in ``ae.pt``."""
    state = {key: torch.from_numpy(value) for key, value in random_arrays(CLASSES[name], seed).items()}
    if "TopK" in name:
        threshold = -1.0 if name == "AutoEncoderTopK" else 0.6
        state |= {"k": torch.tensor(K, dtype=torch.int), "threshold": torch.tensor(threshold)}
    if name == "MatryoshkaBatchTopKSAE":
        state["group_sizes"] = torch.tensor([LATENTS // 4, LATENTS - LATENTS // 4])
    return state


def write_dictionary_learning(
    folder: Path, name: str, state: dict[str, torch.Tensor] | None = None, **more: Any
) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    trainer = {"dict_class": name, "trainer_class": "Trainer", "lr": 1e-4, "layer": 3, "lm_name": "gpt2", "seed": None}
    trainer |= {"k": K} if "TopK" in name else {}
    config = {"trainer": {**trainer, **more}, "buffer": {"d_submodule": DIM, "io": "out"}}
    (folder / "config.json").write_text(json.dumps(config))
    state = dictionary_learning_state(name) if state is None else state
    torch.save(state, folder / "ae.pt")
    return state
