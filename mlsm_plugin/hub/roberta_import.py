"""Import a RoBERTa, XLM-R, CamemBERT or BERT of Hugging Face as ``mlsm_roberta`` (see ``hf_import``)."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlsm_plugin.core.hidden_states.hf_encoder import positions_of
from mlsm_plugin.core.text.hf_tokenizer import FAIRSEQ_PAD
from mlsm_plugin.fairseq_plugin.compat import model_parts
from mlsm_plugin.fairseq_plugin.models.mlsm_roberta import MlsmRobertaModel
from mlsm_plugin.hub.stock_models import TOKEN_TYPES, bert_name, encoder_flags, renamed, roberta_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig


ARCHITECTURE = "mlsm_roberta"
TYPES = ("bert", "camembert", "roberta", "xlm-roberta")
OF_MLSM_ROBERTA = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    **dict.fromkeys(("is_decoder", "add_cross_attention"), False),
}


def check_importable(config: "PretrainedConfig", folder: Path) -> None:
    """Raise ValueError unless ``mlsm_roberta`` computes the same as a model with this configuration."""
    for name, value in OF_MLSM_ROBERTA.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{folder} has {name} {getattr(config, name)}; only {value} can be imported")


def architecture_flags(config: "PretrainedConfig") -> list[str]:
    """Flags of ``fairseq-train`` for the model of a ``RobertaConfig`` or ``BertConfig``."""
    positions = positions_of(config)
    values = {
        "layer_norm_eps": float(config.layer_norm_eps),
        "dropout": float(config.hidden_dropout_prob),
        "attention_dropout": float(config.attention_probs_dropout_prob),
        "untie_weights_roberta": not getattr(config, "tie_word_embeddings", True),
    }
    return encoder_flags(MlsmRobertaModel, config, positions, values)


def imported_weights(state: dict[str, Tensor], ids: Tensor, config: "PretrainedConfig") -> dict[str, Tensor]:
    """Weights of ``mlsm_roberta`` from the state dict of a ``RobertaForMaskedLM`` or ``BertForMaskedLM``, float32.

    ``ids`` holds Hugging Face's id for each id of the dictionary. All tokens have the first token type, whose embedding
    is added to the position embeddings. BERT's positions begin at 0, RoBERTa's after the padding id.
    """
    named = bert_name if config.model_type == "bert" else str
    names = {ours: named(theirs) for theirs, ours in roberta_names(range(int(config.num_hidden_layers))).items()}
    weights = renamed(state, names, ids)
    used = weights[model_parts.POSITIONS][-positions_of(config) :] + state[named(TOKEN_TYPES)][0].float()
    weights[model_parts.POSITIONS] = torch.cat([used.new_zeros(FAIRSEQ_PAD + 1, used.size(1)), used])
    return weights | {f"{model_parts.ENCODER}version": torch.tensor([3.0])}  # as fairseq writes it
