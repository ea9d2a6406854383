"""Check that the auxiliary model, the coder and the text fit together, before anything is coded."""

from typing import Any

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder, HiddenStateSource
from mlsm_plugin.core.hidden_states.sources import open_encoder, source_of
from mlsm_plugin.core.sparse_coding.coder import SparseCoder


def fitting_layer(coder: SparseCoder, chosen: int | None, *, folder: PathLike, option: str) -> int:
    """The layer whose hidden states a coder codes: ``chosen``, or else the layer it was learned from.

    ValueError if neither is known; it names the coder's ``folder`` and the ``option`` to pass.
    """
    layer = coder.meta.get("layer") if chosen is None else chosen
    if layer is None:
        raise ValueError(f"{folder} does not say its layer; pass {option}")
    return int(layer)


def check_width(encoder: HiddenStateEncoder, coder: SparseCoder) -> None:
    """Raise ValueError if the coder and the model differ in width."""
    if encoder.dim != coder.dim:
        raise ValueError(
            f"the dictionary is {coder.dim} wide, the hidden states of the auxiliary model are {encoder.dim} wide"
        )


def check_sample_length(encoder: HiddenStateSource, tokens_per_sample: int) -> None:
    """Raise ValueError if the samples have more tokens than the model has positions."""
    if tokens_per_sample > encoder.max_tokens:
        raise ValueError(
            f"--tokens-per-sample {tokens_per_sample} is more than the {encoder.max_tokens} positions of the auxiliary "
            "model"
        )


def fitting_fingerprint(auxiliary: PathLike, coder: SparseCoder, layer: int) -> str:
    """SHA-256 of the auxiliary model whose layer ``coder`` codes.

    FileNotFoundError or ValueError if the model does not exist; ValueError if the coder belongs to another model or
    layer, or its codes would be arbitrary.
    """
    fingerprint = source_of(auxiliary).fingerprint_of(auxiliary)
    learned_from = coder.meta.get("auxiliary_fingerprint")
    learned_layer = coder.meta.get("layer")
    if learned_from not in (None, fingerprint):
        raise ValueError(
            f"the dictionary was learned from another auxiliary checkpoint (SHA-256 {learned_from[:12]}) than the "
            f"given one ({fingerprint[:12]}); pass that checkpoint, or learn a new dictionary"
        )
    if learned_layer not in (None, layer):
        raise ValueError(f"the dictionary was learned from layer {learned_layer}, not from --layer {layer}")
    coder.check()
    return fingerprint


def fitting_encoder(auxiliary: PathLike, data_bin: PathLike, coder: SparseCoder, settings: Any) -> HiddenStateSource:
    """Open the auxiliary model; raises ValueError if the coder or the blocks do not fit it.

    ``settings`` has ``layer``, ``blocks``, ``device`` and ``fp16``, as the settings of coding and evaluation have.
    """
    encoder = open_encoder(auxiliary, data_bin, layer=settings.layer, device=settings.device, fp16=settings.fp16)
    check_width(encoder, coder)
    check_sample_length(encoder, settings.blocks.tokens_per_sample)
    return encoder
