"""Write an SAE in the files of SAELens, from version 6 on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.files.atomic_files import write_file, write_json
from mlsm_plugin.sparse_coding.formats.saelens import CONFIG_FILE, FACTS, NAME, WEIGHTS_FILE
from mlsm_plugin.sparse_coding.formats.tensor_file import check_safetensors
from mlsm_plugin.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.sparse_coding.sparse_autoencoder import SparseAutoencoder
from mlsm_plugin.sparse_coding.sparse_coder import SparseCoder
from mlsm_plugin.version import __version__

ARCHITECTURES = {"relu": "standard", "topk": "topk", "jumprelu": "jumprelu", "gated": "gated"}
NORMALIZATIONS = {"none": "none", "constant_norm": "constant_norm_rescale", "layer_norm": "layer_norm"}
FORMAT_VERSION = "6.0.0"  # the SAELens that first read these files


def check_exportable(kind: type[SparseCoder]) -> None:
    """Raise ValueError if coders of this kind cannot be written, or the package ``safetensors`` is missing."""
    if not issubclass(kind, SaeCoder):
        reason = "it has no encoder: its codes are the solutions of an optimization problem"
        raise ValueError(
            f"a coder of kind {kind.kind!r} cannot be written for SAELens, which holds sparse autoencoders"
            + (f"; {reason}" if kind.has_gaps else "")
        )
    check_safetensors()


def for_saelens(coder: SaeCoder) -> SaeCoder:
    """The same SAE in the form that :func:`write_saelens` writes: rescaling is folded into the weights.

    With ``n`` the norms of the decoder's rows, ``pre * n`` are the pre-activations of an encoder whose rows and biases
    are multiplied by ``n``, and ``latents / n`` before the decoder is a decoder of unit rows.
    """
    sae = coder.sae.to("cpu")
    if not sae.config.rescale_by_decoder_norm:
        return coder
    norms = sae.decoder_norms
    weights = sae.weights._replace(
        encoder=sae.weights.encoder * norms[:, None],
        encoder_bias=sae.weights.encoder_bias * norms,
        decoder=sae.weights.decoder / norms.clamp(min=torch.finfo(torch.float32).tiny)[:, None],
    )
    config = dataclasses.replace(sae.config, rescale_by_decoder_norm=False)
    return SaeCoder(SparseAutoencoder(config, weights), coder.meta)


def write_saelens(coder: SaeCoder, folder: str | os.PathLike[str]) -> None:
    """Write ``sae_weights.safetensors``, and ``cfg.json`` last, without which SAELens does not load the folder.

    ``sae_lens.SAE.load_from_disk`` gives the same latents and reconstructions; only a hidden state of zeros under
    ``constant_norm`` is NaN there.

    Args:
        coder: what :func:`for_saelens` returned.
        folder: an existing folder.

    Raises:
        ValueError: the package ``safetensors`` is missing.
        OSError: a file cannot be written.
    """
    check_safetensors()
    from safetensors.torch import save

    folder = Path(folder)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    content = save({name: tensor.contiguous() for name, tensor in _tensors(coder.sae).items()})
    write_file(folder / WEIGHTS_FILE, lambda file: file.write(content))
    write_json(folder / CONFIG_FILE, _configuration(coder))


def _tensors(sae: SparseAutoencoder) -> dict[str, Tensor]:
    weights = sae.to("cpu").weights
    named: dict[str, Tensor | None] = {"W_enc": weights.encoder.T, "W_dec": weights.decoder}
    named["b_dec"] = weights.decoder_bias
    named["b_gate" if sae.config.activation == "gated" else "b_enc"] = weights.encoder_bias
    named |= {"threshold": weights.threshold, "r_mag": weights.gate_scale, "b_mag": weights.gate_bias}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _configuration(coder: SaeCoder) -> dict[str, Any]:
    config = coder.sae.config
    imported = coder.meta.get("imported_from")
    facts = imported if isinstance(imported, dict) and imported.get("format") == NAME else {}
    origin = {name: coder.meta.get(name) for name in ("layer", "auxiliary_fingerprint")}
    return {
        "architecture": ARCHITECTURES[config.activation],
        "d_in": coder.dim,
        "d_sae": coder.num_atoms,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": config.subtract_decoder_bias,
        "normalize_activations": NORMALIZATIONS[config.input_norm],
        "reshape_activations": "none",
        **({} if config.k is None else {"k": config.k, "rescale_acts_by_decoder_norm": False}),
        "metadata": {
            **{name: facts[name] for name in FACTS if name in facts},
            "sae_lens_version": FORMAT_VERSION,
            "sae_lens_training_version": facts.get("sae_lens_training_version"),
            "mlsm_plugin": {"version": __version__, **origin},
        },
    }
