"""SAEs of dictionary_learning: ``config.json`` and ``ae.pt`` (https://github.com/saprmarks/dictionary_learning).

The latents are those of the class that ``config.json`` names, as ``dictionary_learning.utils.load_dictionary`` loads
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from mlsm_plugin.files.json_checks import text, whole
from mlsm_plugin.sparse_coding.formats.config_file import ConfigFile
from mlsm_plugin.sparse_coding.formats.tensor_file import TensorFile, read_torch
from mlsm_plugin.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder

NAME = "dictionary_learning"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "ae.pt"
# kept in meta.json under imported_from
FACTS = ("lm_name", "layer", "submodule_name", "trainer_class")
# settings of training, which do not change the latents of given weights
TRAINING = """
lr steps seed device wandb_name warmup_steps decay_start auxk_alpha threshold_beta threshold_start_step top_k_aux
l1_penalty resample_steps sparsity_warmup_steps sparsity_function sparsity_penalty p_start p_end anneal_start
sparsity_queue_length n_sparsity_updates bandwidth target_l0 group_fractions group_weights group_sizes norm_factor
k_anneal_steps
"""
WITHOUT_EFFECT = frozenset(TRAINING.split())
Contents = tuple[SaeConfig, SaeWeights]


def read_dictionary_learning(folder: str | os.PathLike[str]) -> SaeCoder:
    """Read an SAE of one of the six classes of ``CLASSES``.

    Args:
        folder: the folder of one trainer, with the two files.

    Raises:
        ValueError: a file is missing or damaged, or the SAE is of another class.
    """
    folder = Path(folder)
    config = ConfigFile.read(folder / CONFIG_FILE)
    trainer, buffer = config.part("trainer"), config.part("buffer")
    config.finish()
    if buffer.take("io", text, "out") == "in_and_out":
        raise ValueError(f"{config.path}: io in_and_out is refused: it is a transcoder, which has another output")
    name = trainer.take("dict_class", text)
    if name not in CLASSES:
        raise ValueError(f"{config.path}: the dict_class {name[:60]!r} is refused; known are {', '.join(CLASSES)}")
    facts = trainer.facts(FACTS)
    k = trainer.take("k", whole(1), None)
    claimed = trainer.take("dict_size", whole(1), None), trainer.take("activation_dim", whole(1), None)
    trainer.finish(WITHOUT_EFFECT)

    file = read_torch(folder / WEIGHTS_FILE)
    sae_config, weights = CLASSES[name](file, k)
    file.finish()
    for found, wanted in zip(weights.encoder.shape, claimed, strict=True):
        if wanted is not None and found != wanted:
            raise ValueError(
                f"{file.path}: the encoder is {tuple(weights.encoder.shape)}, but {CONFIG_FILE} says {wanted}"
            )
    try:
        sae = SparseAutoencoder(sae_config, weights)
    except ValueError as error:
        raise ValueError(f"{folder} is not a valid SAE: {error}") from None
    return SaeCoder(sae, {"imported_from": {"format": NAME, "architecture": name, **facts}})


def _auto_encoder(file: TensorFile, k: int | None) -> Contents:
    """A ReLU SAE, whose decoder is normalized as the library does when it loads it."""
    weights = SaeWeights(
        encoder=file.take("encoder.weight", 2),
        encoder_bias=file.take("encoder.bias"),
        decoder=file.take("decoder.weight", 2).T,
        decoder_bias=file.take("bias"),
    )
    norms = torch.linalg.vector_norm(weights.decoder, dim=1)
    if not torch.isfinite(norms).all() or torch.allclose(norms, torch.ones_like(norms)):
        return SaeConfig("relu"), weights
    if not bool((norms > 0).all()):
        raise ValueError(f"{file.path}: decoder.weight has a column of zeros, which cannot be normalized")
    if len(norms) != len(weights.encoder) or len(norms) != len(weights.encoder_bias):
        raise ValueError(f"{file.path}: encoder and decoder have different numbers of latents")
    return SaeConfig("relu"), weights._replace(
        encoder=weights.encoder * norms[:, None],
        encoder_bias=weights.encoder_bias * norms,
        decoder=weights.decoder / norms[:, None],
    )


def _gated(file: TensorFile, k: int | None) -> Contents:
    return SaeConfig("gated"), SaeWeights(
        encoder=file.take("encoder.weight", 2),
        encoder_bias=file.take("gate_bias"),
        decoder=file.take("decoder.weight", 2).T,
        decoder_bias=file.take("decoder_bias"),
        gate_scale=file.take("r_mag"),
        gate_bias=file.take("mag_bias"),
    )


def _jump_relu(file: TensorFile, k: int | None) -> Contents:
    config = SaeConfig("jumprelu", subtract_decoder_bias=False)
    return config, _matrix_weights(file)._replace(threshold=file.take("threshold"))


def _top_k(file: TensorFile, k: int | None) -> Contents:
    k = _same_k(file, k)
    file.leave_out("threshold")  # an alternative to k that encode() does not use by default
    return SaeConfig("topk", k), _linear_weights(file)


def _batch_top_k(file: TensorFile, k: int | None) -> Contents:
    _same_k(file, k)
    weights = _linear_weights(file)
    return SaeConfig("jumprelu"), weights._replace(threshold=_global_threshold(file, len(weights.encoder)))


def _matryoshka(file: TensorFile, k: int | None) -> Contents:
    _same_k(file, k)
    file.leave_out("group_sizes")  # all groups are used
    weights = _matrix_weights(file)
    return SaeConfig("jumprelu"), weights._replace(threshold=_global_threshold(file, len(weights.encoder)))


def _linear_weights(file: TensorFile) -> SaeWeights:
    return SaeWeights(
        encoder=file.take("encoder.weight", 2),
        encoder_bias=file.take("encoder.bias"),
        decoder=file.take("decoder.weight", 2).T,
        decoder_bias=file.take("b_dec"),
    )


def _matrix_weights(file: TensorFile) -> SaeWeights:
    return SaeWeights(
        encoder=file.take("W_enc", 2).T,
        encoder_bias=file.take("b_enc"),
        decoder=file.take("W_dec", 2),
        decoder_bias=file.take("b_dec"),
    )


def _same_k(file: TensorFile, k: int | None) -> int:
    """k of the configuration, with which k of the weights must agree."""
    if k is None:
        raise ValueError(f"{file.path}: {CONFIG_FILE} lacks k")
    if "k" in file and (found := file.number("k")) != k:
        raise ValueError(f"{file.path} says k {found:g}, but {CONFIG_FILE} says {k}")
    return k


def _global_threshold(file: TensorFile, latents: int) -> torch.Tensor:
    """The threshold below 0 of an SAE that was hardly trained lets every positive latent pass."""
    return torch.full((latents,), file.number("threshold"))


CLASSES: dict[str, Callable[[TensorFile, int | None], Contents]] = {
    "AutoEncoder": _auto_encoder,
    "GatedAutoEncoder": _gated,
    "JumpReluAutoEncoder": _jump_relu,
    "AutoEncoderTopK": _top_k,
    "BatchTopKSAE": _batch_top_k,
    "MatryoshkaBatchTopKSAE": _matryoshka,
}
