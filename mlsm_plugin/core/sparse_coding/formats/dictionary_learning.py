"""SAEs of dictionary_learning: ``config.json`` and ``ae.pt`` (https://github.com/saprmarks/dictionary_learning).

The latents are the same as those of the class named in ``config.json`` when
``dictionary_learning.utils.load_dictionary`` loads it.
"""

from pathlib import Path

import torch

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import text, whole
from mlsm_plugin.core.sparse_coding.formats.foreign_files import ConfigFile, TensorFile, imported_sae, read_torch
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig

NAME = "dictionary_learning"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "ae.pt"
FACTS = ("lm_name", "layer", "submodule_name", "trainer_class")  # kept in meta.json under imported_from
# training settings, which do not change the latents once the weights are fixed
TRAINING = """
lr steps seed device wandb_name warmup_steps decay_start auxk_alpha threshold_beta threshold_start_step top_k_aux
l1_penalty resample_steps sparsity_warmup_steps sparsity_function sparsity_penalty p_start p_end anneal_start
sparsity_queue_length n_sparsity_updates bandwidth target_l0 group_fractions group_weights group_sizes norm_factor
k_anneal_steps
"""
WITHOUT_EFFECT = frozenset(TRAINING.split())
LINEAR = {
    "encoder": "encoder.weight",
    "encoder_bias": "encoder.bias",
    "decoder": "decoder.weight",
    "decoder_bias": "b_dec",
}
MATRICES = {"encoder": "W_enc", "encoder_bias": "b_enc", "decoder": "W_dec", "decoder_bias": "b_dec"}
GATED = {"encoder_bias": "gate_bias", "decoder_bias": "decoder_bias", "gate_scale": "r_mag", "gate_bias": "mag_bias"}
# class of dictionary_learning -> our activation, and the names of its tensors
CLASSES = {
    "AutoEncoder": ("relu", {**LINEAR, "decoder_bias": "bias"}),
    "GatedAutoEncoder": ("gated", {**LINEAR, **GATED}),
    "JumpReluAutoEncoder": ("jumprelu", {**MATRICES, "threshold": "threshold"}),
    "AutoEncoderTopK": ("topk", LINEAR),
    "BatchTopKSAE": ("jumprelu", LINEAR),
    "MatryoshkaBatchTopKSAE": ("jumprelu", MATRICES),
}
WITH_A_GLOBAL_THRESHOLD = ("BatchTopKSAE", "MatryoshkaBatchTopKSAE")
# an alternative to k that encode() does not use by default; all groups are used
TENSORS_WITHOUT_EFFECT = {"AutoEncoderTopK": ("threshold",), "MatryoshkaBatchTopKSAE": ("group_sizes",)}


def read_dictionary_learning(folder: PathLike) -> SaeCoder:
    """Read an SAE of one of the ``CLASSES`` from a trainer's folder, which has the two files.

    ValueError if a file is missing or damaged, or the SAE is of another class.
    """
    folder = Path(folder)
    config = ConfigFile.read(folder / CONFIG_FILE)
    trainer = config.part("trainer")
    buffer = config.part("buffer")
    config.finish()
    if buffer.take("io", text, "out") == "in_and_out":
        raise ValueError(f"{config.path}: io in_and_out is refused: it is a transcoder, which has another output")
    name = trainer.take("dict_class", text)
    if name not in CLASSES:
        raise ValueError(f"{config.path}: the dict_class {name[:60]!r} is refused; known are {', '.join(CLASSES)}")
    facts = {"format": NAME, "architecture": name, **trainer.facts(FACTS)}
    k = trainer.take("k", whole(1), None)
    dict_size = trainer.take("dict_size", whole(1), None)
    activation_dim = trainer.take("activation_dim", whole(1), None)
    trainer.finish(WITHOUT_EFFECT)

    file = read_torch(folder / WEIGHTS_FILE)
    activation, names = CLASSES[name]
    if activation == "topk" or name in WITH_A_GLOBAL_THRESHOLD:
        _check_same_k(file, k)
    weights = file.weights(names)
    if name in WITH_A_GLOBAL_THRESHOLD:  # negative after little training: every positive latent passes
        weights = weights._replace(threshold=torch.full((len(weights.encoder),), file.number("threshold")))
    file.finish(TENSORS_WITHOUT_EFFECT.get(name, ()))
    sae_config = SaeConfig(activation, k if activation == "topk" else None, name != "JumpReluAutoEncoder")
    latents, dim = weights.encoder.shape
    coder = imported_sae(file, sae_config, weights, (dict_size or latents, activation_dim or dim), facts)
    norms = torch.linalg.vector_norm(weights.decoder, dim=1)
    if name != "AutoEncoder" or torch.allclose(norms, torch.ones_like(norms)):
        return coder
    # that program normalizes the decoder when it loads it
    if not bool((norms > 0).all()):
        raise ValueError(f"{file.path}: decoder.weight has a column of zeros, which cannot be normalized")
    return SaeCoder(coder.sae.with_unit_decoder(norms), {"imported_from": facts})


def _check_same_k(file: TensorFile, k: int | None) -> None:
    """Raise ValueError if ``config.json`` lacks k, or the weights hold another k."""
    if k is None:
        raise ValueError(f"{file.path}: {CONFIG_FILE} lacks k")
    if "k" in file and (k_of_weights := file.number("k")) != k:
        raise ValueError(f"{file.path} says k {k_of_weights:g}, but {CONFIG_FILE} says {k}")
