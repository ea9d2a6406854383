"""Compare converted SAEs with the original programs, and exported SAEs with SAELens.

Makes random SAEs of each architecture with each program, saves them with that program, converts them with ``mlsm
convert``, and prints the largest differences of latents and reconstructions. Then exports SAEs of this package, loads
them with SAELens, and compares again. A difference above ``--tolerance`` is an error.

It needs the programs themselves: ``pip install sae-lens eai-sparsify dictionary-learning``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsm_plugin.cli.main import main as mlsm
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder, tensors_of

ROWS = 256
ORIGIN = {"layer": 5, "auxiliary": "hf:organization/encoder", "text": "data-bin/train"}  # of exported SAEs
# (latents, reconstructions) of hidden states
Reference = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# name, and a function that saves an SAE to a folder and returns the reference
Case = tuple[str, Callable[[Path], Reference]]


def randomize(module: torch.nn.Module, names: dict[str, float]) -> None:
    """Set parameters and buffers to random values; ``names`` maps their names to standard deviations."""
    with torch.no_grad():
        for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
            if name in names:
                tensor.copy_(torch.randn(tensor.shape) * names[name])


def encode_and_decode(sae: Any) -> Reference:
    """The reference of a program whose SAEs have ``encode`` and ``decode``."""

    def reference(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = sae.encode(hidden)
        return latents, sae.decode(latents)

    return reference


# ---- SAELens ----


def saelens_cases(dim: int, latents: int) -> Iterator[Case]:
    """Files for inference, and files that training writes."""
    import sae_lens

    norms = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm")
    kinds = {
        "standard": (sae_lens.StandardSAE, sae_lens.StandardSAEConfig, {}),
        "topk": (sae_lens.TopKSAE, sae_lens.TopKSAEConfig, {"k": 8}),
        "topk, rescaled": (sae_lens.TopKSAE, sae_lens.TopKSAEConfig, {"k": 8, "rescale_acts_by_decoder_norm": True}),
        "jumprelu": (sae_lens.JumpReLUSAE, sae_lens.JumpReLUSAEConfig, {}),
        "gated": (sae_lens.GatedSAE, sae_lens.GatedSAEConfig, {}),
    }
    for (kind, made_of), norm, apply in itertools.product(kinds.items(), norms, (True, False)):
        yield (
            f"SAELens {kind}, {norm}, {'b_dec subtracted' if apply else 'b_dec not subtracted'}",
            lambda folder, made_of=made_of, norm=norm, apply=apply: _saelens(
                folder, *made_of, d_in=dim, d_sae=latents, normalize_activations=norm, apply_b_dec_to_input=apply
            ),
        )
    training = {
        "standard": (sae_lens.StandardTrainingSAE, sae_lens.StandardTrainingSAEConfig, {}),
        "topk": (sae_lens.TopKTrainingSAE, sae_lens.TopKTrainingSAEConfig, {"k": 8}),
        "jumprelu": (sae_lens.JumpReLUTrainingSAE, sae_lens.JumpReLUTrainingSAEConfig, {}),
        "gated": (sae_lens.GatedTrainingSAE, sae_lens.GatedTrainingSAEConfig, {}),
        "batchtopk": (sae_lens.BatchTopKTrainingSAE, sae_lens.BatchTopKTrainingSAEConfig, {"k": 8.5}),
        "batchtopk, not rescaled": (
            sae_lens.BatchTopKTrainingSAE,
            sae_lens.BatchTopKTrainingSAEConfig,
            {"k": 8.5, "rescale_acts_by_decoder_norm": False},
        ),
        "matryoshka_batchtopk": (
            sae_lens.MatryoshkaBatchTopKTrainingSAE,
            sae_lens.MatryoshkaBatchTopKTrainingSAEConfig,
            {"k": 8, "matryoshka_widths": [latents // 4, latents]},
        ),
    }
    for kind, (sae, config, more) in training.items():
        for inference in (False, True):
            yield (
                f"SAELens {kind}, {'saved for inference' if inference else 'as in training'}",
                lambda folder, sae=sae, config=config, more=more, inference=inference: _saelens_training(
                    folder, sae, config, more, inference, d_in=dim, d_sae=latents
                ),
            )
    for flat in FLAT:
        yield f"SAELens before 6, {flat}", lambda folder, flat=flat: _saelens_flat(folder, FLAT[flat], dim, latents)


SPREAD = {"W_enc": 0.3, "W_dec": 0.15, "b_enc": 0.2, "b_dec": 0.5, "b_gate": 0.2, "b_mag": 0.2, "r_mag": 0.3}


def _saelens(folder: Path, sae_type: Any, config_type: Any, more: dict[str, Any], **settings: Any) -> Reference:
    from sae_lens import SAE

    sae = sae_type(config_type(**settings, **more))
    randomize(sae, {**SPREAD, "threshold": 0.4})
    sae.save_model(folder)
    return encode_and_decode(SAE.load_from_disk(folder))


def _saelens_training(
    folder: Path, sae_type: Any, config_type: Any, more: dict[str, Any], inference: bool, **settings: Any
) -> Reference:
    """The reference is always the SAE that SAELens saves for inference."""
    from sae_lens import SAE

    sae = sae_type(config_type(**settings, **more))
    randomize(sae, {**SPREAD, "threshold": 0.4})
    if "topk_threshold" in dict(sae.named_buffers()):
        sae.topk_threshold.fill_(0.7)
    with tempfile.TemporaryDirectory() as saved:
        sae.save_inference_model(folder if inference else saved)
        if not inference:
            sae.save_model(folder)
        return encode_and_decode(SAE.load_from_disk(folder if inference else saved))


FLAT: dict[str, dict[str, Any]] = {
    "standard (version 1)": {
        "hook_point": "blocks.0.hook_resid_pre",
        "hook_point_layer": 0,
        "hook_point_head_index": None,
        "use_ghost_grads": False,
        "l1_coefficient": 8e-5,
        "expansion_factor": 32,
        "normalize_activations": False,
        "dtype": "torch.float32",
    },
    "topk as an activation (version 4)": {
        "architecture": "standard",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 8},
        "apply_b_dec_to_input": False,
        "finetuning_scaling_factor": False,
        "hook_name": "blocks.3.hook_resid_post",
        "hook_layer": 3,
        "normalize_activations": "constant_norm_rescale",
        "sae_lens_training_version": "4.1.0",
        "dtype": "float32",
    },
    "relu (version 5)": {
        "architecture": "standard",
        "activation_fn_str": "relu",
        "activation_fn_kwargs": {},
        "apply_b_dec_to_input": False,
        "finetuning_scaling_factor": False,
        "hook_name": "blocks.3.hook_resid_post",
        "normalize_activations": "layer_norm",
        "seqpos_slice": [None],
        "dtype": "float32",
    },
}


def _saelens_flat(folder: Path, settings: dict[str, Any], dim: int, latents: int) -> Reference:
    from sae_lens import SAE
    from safetensors.torch import save_file

    shapes = {"W_enc": (dim, latents), "W_dec": (latents, dim), "b_enc": (latents,), "b_dec": (dim,)}
    tensors = {name: torch.randn(shape) * SPREAD[name] for name, shape in shapes.items()}
    tensors["scaling_factor"] = torch.ones(latents)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "sae_weights.safetensors")
    more = {"d_in": dim, "d_sae": latents, "model_name": "gpt2-small", "device": "cpu"}
    (folder / "cfg.json").write_text(json.dumps({**settings, **more}))
    return encode_and_decode(SAE.load_from_disk(folder))


# ---- sparsify ----


def sparsify_cases(dim: int, latents: int) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield f"sparsify topk, {str(dtype)[6:]}", lambda folder, dtype=dtype: _sparsify(folder, dim, latents, dtype)


def _sparsify(folder: Path, dim: int, latents: int, dtype: torch.dtype) -> Reference:
    os.environ.setdefault("SPARSIFY_DISABLE_TRITON", "1")  # it would need a GPU
    from sparsify import SparseCoder
    from sparsify.config import SparseCoderConfig

    sae = SparseCoder(dim, SparseCoderConfig(num_latents=latents, k=8))
    randomize(sae, {"encoder.weight": 0.3, "encoder.bias": 0.2, "W_dec": 0.15, "b_dec": 0.5})
    sae.to(dtype).save_to_disk(folder)
    loaded = SparseCoder.load_from_disk(folder).float()

    def reference(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, columns, _ = loaded.encode(hidden)
        dense = torch.zeros(len(hidden), latents).scatter_(1, columns, values)
        return dense, loaded.decode(values, columns)

    return reference


# ---- dictionary_learning ----


def dictionary_learning_cases(dim: int, latents: int) -> Iterator[Case]:
    from dictionary_learning.dictionary import AutoEncoder, GatedAutoEncoder, JumpReluAutoEncoder
    from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
    from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
    from dictionary_learning.trainers.top_k import AutoEncoderTopK

    groups = [latents // 4, latents - latents // 4]
    kinds: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "AutoEncoder": (AutoEncoder, {}, {}),
        "AutoEncoder, unit decoder": (AutoEncoder, {}, {}),
        "GatedAutoEncoder": (GatedAutoEncoder, {}, {}),
        "JumpReluAutoEncoder": (JumpReluAutoEncoder, {}, {}),
        "AutoEncoderTopK": (AutoEncoderTopK, {"k": 8}, {}),
        "BatchTopKSAE": (BatchTopKSAE, {"k": 8}, {"threshold": 0.7}),
        "BatchTopKSAE, no threshold yet": (BatchTopKSAE, {"k": 8}, {"threshold": -1.0}),
        "MatryoshkaBatchTopKSAE": (MatryoshkaBatchTopKSAE, {"k": 8, "group_sizes": groups}, {"threshold": 0.7}),
    }
    for name, kind in kinds.items():
        yield (
            f"dictionary_learning {name}",
            lambda folder, name=name, kind=kind: _dictionary_learning(folder, name, *kind, dim, latents),
        )


def _dictionary_learning(
    folder: Path, name: str, kind: Any, more: dict[str, Any], values: dict[str, float], dim: int, latents: int
) -> Reference:
    from dictionary_learning.utils import load_dictionary

    sae = kind(dim, latents, **more)
    spread = {**SPREAD, "encoder.weight": 0.3, "encoder.bias": 0.2, "decoder.weight": 0.15, "bias": 0.5}
    randomize(sae, {**spread, "decoder_bias": 0.5, "gate_bias": 0.2, "mag_bias": 0.2})
    if "unit" in name:
        sae.decoder.weight.data /= sae.decoder.weight.data.norm(dim=0)
    if kind.__name__ == "JumpReluAutoEncoder":
        randomize(sae, {"threshold": 0.4})
    for buffer, value in values.items():
        getattr(sae, buffer).fill_(value)
    folder.mkdir(parents=True)
    torch.save(sae.state_dict(), folder / "ae.pt")
    trainer = {"dict_class": kind.__name__, "k": more.get("k"), "layer": 3, "lm_name": "gpt2", "lr": 1e-4}
    config = {"trainer": {name: value for name, value in trainer.items() if value is not None}}
    (folder / "config.json").write_text(json.dumps(config))
    loaded, _ = load_dictionary(str(folder), device="cpu")
    return encode_and_decode(loaded)


# ---- export ----


def export_cases(dim: int, latents: int) -> Iterator[tuple[str, SaeCoder]]:
    choices = itertools.product(
        ("relu", "topk", "jumprelu", "gated"), ("none", "constant_norm", "layer_norm"), (True, False), (True, False)
    )
    for activation, norm, subtract, rescale in choices:
        if rescale and activation == "gated":
            continue
        config = SaeConfig(activation, 8 if activation == "topk" else None, subtract, norm, rescale)
        shapes = {"encoder": (latents, dim), "decoder": (latents, dim), "decoder_bias": (dim,)}
        tensors = {
            name: torch.randn(shapes.get(name, (latents,))) * (0.15 if name == "decoder" else 0.3)
            for name in tensors_of(config)
        }
        words = [activation, norm, *(["b_dec subtracted"] * subtract), *(["rescaled"] * rescale)]
        yield f"to SAELens: {', '.join(words)}", SaeCoder(SparseAutoencoder(config, SaeWeights(**tensors)), ORIGIN)


def check_export(coder: SaeCoder, root: Path, hidden: torch.Tensor) -> tuple[float, float]:
    from sae_lens import SAE

    coder.save(root / "own")
    _run("convert", root / "own", root / "exported")
    sae = SAE.load_from_disk(root / "exported")
    metadata = sae.cfg.metadata
    origin = (metadata.model_name, metadata.hook_name, metadata.dataset_path)
    if origin != ("organization/encoder", "hidden_states.5", "data-bin/train"):
        raise RuntimeError(f"SAELens reads another origin: {origin}")
    return differences(coder, encode_and_decode(sae), hidden)


# ---- comparison ----


def differences(coder: Any, reference: Reference, hidden: torch.Tensor) -> tuple[float, float]:
    """The largest absolute differences of latents and of reconstructions."""
    with torch.no_grad():
        expected_latents, expected_reconstructions = (part.numpy() for part in reference(hidden))
    codes = coder.encode(hidden).codes
    if not 0 < codes.nnz < codes.shape[0] * codes.shape[1]:
        raise RuntimeError("all latents are zero, or none; the comparison would say nothing")
    reconstructions = coder.reconstruct(hidden, codes)
    return tuple(
        float(np.abs(actual - expected).max())
        for actual, expected in ((codes.toarray(), expected_latents), (reconstructions, expected_reconstructions))
    )  # type: ignore[return-value]


def check_import(make: Callable[[Path], Reference], root: Path, hidden: torch.Tensor) -> tuple[float, float]:
    reference = make(root / "layers.3")
    _run("convert", root / "layers.3", root / "converted")
    return differences(load_coder(root / "converted"), reference, hidden)


def _run(*words: object) -> None:
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()):
        status = mlsm([str(word) for word in words])
    if status != 0:
        raise RuntimeError(f"mlsm {words} ended with {status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=32, help="width of the hidden states")
    parser.add_argument("--latents", type=int, default=128, help="number of latents")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference that is no error")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.manual_seed(args.seed)
    hidden = torch.randn(ROWS, args.dim) + 0.3
    sizes = args.dim, args.latents
    imports = itertools.chain(saelens_cases(*sizes), sparsify_cases(*sizes), dictionary_learning_cases(*sizes))
    checks = [(name, check_import, make) for name, make in imports]
    checks += [(name, check_export, coder) for name, coder in export_cases(*sizes)]
    print("| SAE | latents differ by | reconstructions differ by |\n| --- | ---: | ---: |")
    worst = 0.0
    for name, check, subject in checks:
        with tempfile.TemporaryDirectory() as root:
            errors = check(subject, Path(root), hidden)
        worst = max(worst, *errors)
        print(f"| {name} | {errors[0]:.1e} | {errors[1]:.1e} |", flush=True)
    print(f"\n{len(checks)} comparisons on {ROWS} hidden states; the largest difference is {worst:.1e}")
    return int(not worst <= args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
