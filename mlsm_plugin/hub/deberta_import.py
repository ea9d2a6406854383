"""Import a ``DebertaV2ForMaskedLM`` of Hugging Face as ``mlsm_deberta`` (see ``hf_import``)."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mlsm_plugin.fairseq_plugin.compat.model_parts import EMBEDDINGS, OUTPUT
from mlsm_plugin.fairseq_plugin.models.mlsm_deberta import MlsmDebertaModel
from mlsm_plugin.hub.stock_models import OF_MLSM_DEBERTA, deberta_names, encoder_flags, joined, renamed

if TYPE_CHECKING:
    from transformers import PretrainedConfig


ARCHITECTURE = "mlsm_deberta"


def check_importable(config: "PretrainedConfig", folder: Path) -> None:
    """Raise ValueError unless ``mlsm_deberta`` computes the same as a model with this configuration."""
    width = config.hidden_size
    kinds = config.pos_att_type or []
    width_of_head = width // max(1, config.num_attention_heads)
    further = {"embedding_size": width, "attention_head_size": width_of_head, "conv_kernel_size": 0}
    values = {name: getattr(config, name, None) for name in OF_MLSM_DEBERTA}
    values |= {name: getattr(config, name, value) for name, value in further.items()}
    values["pos_att_type"] = sorted(kinds, reverse=True)
    for name, value in {**OF_MLSM_DEBERTA, **further}.items():
        if values[name] != value:
            raise ValueError(f"{folder} has {name} {values[name]}; only {value} can be imported")


def architecture_flags(config: "PretrainedConfig") -> list[str]:
    """Flags of ``fairseq-train`` for the model of a ``DebertaV2Config``."""
    positions = int(config.max_position_embeddings)
    longest = int(config.max_relative_positions)
    values = {
        "position_buckets": max(0, int(getattr(config, "position_buckets", 0))),
        "max_relative_positions": longest if longest > 0 else positions,
        "dropout": float(config.hidden_dropout_prob),
        "attention_dropout": float(config.attention_probs_dropout_prob),
    }
    return encoder_flags(MlsmDebertaModel, config, positions, values)


def imported_weights(state: dict[str, Tensor], ids: Tensor, config: "PretrainedConfig") -> dict[str, Tensor]:
    """Weights of ``mlsm_deberta`` from the state dict of a ``DebertaV2ForMaskedLM``, float32.

    ``ids`` holds Hugging Face's id for each id of the dictionary.
    """
    names = deberta_names(int(config.num_hidden_layers), legacy=bool(getattr(config, "legacy", True)))
    weights = renamed(state, {ours: theirs for theirs, ours in names.items()}, ids)
    return joined({OUTPUT: weights[EMBEDDINGS], **weights})
