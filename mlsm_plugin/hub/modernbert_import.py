"""Import a ``ModernBertForMaskedLM`` of Hugging Face as ``mlsm_modern`` (see ``hf_import``)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.hf_files import GLOBAL, LOCAL, global_every
from mlsm_plugin.fairseq_plugin.models.mlsm_modern import MlsmModernModel
from mlsm_plugin.hub.stock_models import encoder_flags, library_classes, modernbert_names, renamed

if TYPE_CHECKING:
    from transformers import PretrainedConfig


ARCHITECTURE = "mlsm_modern"
OF_MLSM_MODERN = {
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
    **dict.fromkeys(("hidden_activation", "classifier_activation"), "gelu"),
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
}


def check_importable(config: "PretrainedConfig", folder: Path) -> None:
    """Raise ValueError unless ``mlsm_modern`` computes the same as a model with this configuration."""
    library_classes()  # raises an error if transformers is too old
    for name, value in OF_MLSM_MODERN.items():
        if getattr(config, name) != value:
            raise ValueError(f"{folder} has {name} {getattr(config, name)}; only {value} can be imported")
    for kind in set(config.layer_types):
        rope = config.rope_parameters[kind]["rope_type"]
        if rope != "default":
            raise ValueError(f"{folder} has rotary positions of type {rope}; only the default type can be imported")
    if LOCAL in config.layer_types and config.local_attention < 2:
        raise ValueError(f"{folder} has local_attention {config.local_attention}; it must be at least 2 to be imported")
    if global_every(config.layer_types) is None:
        raise ValueError(
            f"{folder} has other layer_types than every N-th layer global, beginning with the first; it cannot be "
            "imported"
        )


def architecture_flags(config: "PretrainedConfig") -> list[str]:
    """Flags of ``fairseq-train`` for the model of a ``ModernBertConfig``."""
    positions = int(config.max_position_embeddings)
    rope = config.rope_parameters
    values: dict[str, Any] = {
        "attention_window": 0,
        "rope_theta": float(rope[GLOBAL]["rope_theta"]),
        "dropout": float(config.embedding_dropout),
        "attention_dropout": float(config.attention_dropout),
        "activation_dropout": float(config.mlp_dropout),
    }
    if LOCAL in config.layer_types:
        values |= {
            "attention_window": 2 * (int(config.local_attention) // 2),
            "global_attention_every": global_every(config.layer_types),
            "local_rope_theta": float(rope[LOCAL]["rope_theta"]),
        }
    return encoder_flags(MlsmModernModel, config, positions, values)


def imported_weights(state: dict[str, Tensor], ids: Tensor, config: "PretrainedConfig") -> dict[str, Tensor]:
    """Weights of ``mlsm_modern`` from the state dict of a ``ModernBertForMaskedLM``, float32.

    ``ids`` holds Hugging Face's id for each id of the dictionary. A missing output bias becomes 0.
    """
    state = {"decoder.bias": torch.zeros(len(state["decoder.weight"]))} | state
    names = {ours: theirs for theirs, ours in modernbert_names(int(config.num_hidden_layers)).items()}
    return {name: values.clone() for name, values in renamed(state, names, ids).items()}
