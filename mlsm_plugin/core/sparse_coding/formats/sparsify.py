"""SAEs of sparsify: ``cfg.json`` and ``sae.safetensors`` (https://github.com/EleutherAI/sparsify).

A latent is one of the k largest of ``relu(encoder.weight (x - b_dec) + encoder.bias)`` (Gao et al., 2024, arXiv
2406.04093).
"""

from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import whole
from mlsm_plugin.core.sparse_coding.formats.foreign_files import (
    ConfigFile,
    imported_sae,
    one_of,
    read_safetensors,
    yes_or_no,
)
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig

NAME = "sparsify"
CONFIG_FILE = "cfg.json"
WEIGHTS_FILE = "sae.safetensors"
TENSORS = {"encoder": "encoder.weight", "encoder_bias": "encoder.bias", "decoder": "W_dec", "decoder_bias": "b_dec"}
WITHOUT_EFFECT = ("normalize_decoder", "multi_topk")  # these only decide the initial weights and the loss
REFUSED = {
    "transcode": "a transcoder predicts the output of another place in the model, and does not reconstruct its input",
    "skip_connection": "a linear map of the input is added to what the latents stand for",
    "signed": "its latents can be negative, and codes are not",
}


def read_sparsify(folder: PathLike) -> SaeCoder:
    """Read an SAE; its latents and reconstructions equal those of ``sparsify.SparseCoder.load_from_disk``, in float32.

    ``folder`` belongs to one hook point, such as ``layers.5``. ValueError if a file is missing or damaged, or this kind
    of SAE cannot be converted (says why).
    """
    folder = Path(folder)
    config = ConfigFile.read(folder / CONFIG_FILE)
    for name, reason in REFUSED.items():
        if config.take(name, yes_or_no, False):
            raise ValueError(f"{config.path}: {name} is refused: {reason}")
    if config.take("activation", one_of("topk", "groupmax"), "topk") == "groupmax":
        raise ValueError(f"{config.path}: the activation groupmax is refused: it keeps one latent of each group")
    k = config.take("k", whole(1))
    dim = config.take("d_in", whole(1))
    factor = config.take("expansion_factor", whole(0), 32)
    latents = config.take("num_latents", whole(0), 0)
    config.finish(WITHOUT_EFFECT)

    file = read_safetensors(folder / WEIGHTS_FILE)
    if "W_skip" in file:
        raise ValueError(f"{file.path}: W_skip is refused: {REFUSED['skip_connection']}")
    weights = file.weights(TENSORS)
    file.finish()
    facts = {"format": NAME, "hookpoint": folder.resolve().name}
    return imported_sae(file, SaeConfig("topk", k), weights, (latents or dim * factor, dim), facts)
