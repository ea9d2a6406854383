"""The stock ``ModernBertForMaskedLM`` that computes what a model of ``mlsm_modern`` computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mlsm_plugin.fairseq_seams import model_parts
from mlsm_plugin.files.hf_files import GLOBAL, LOCAL
from mlsm_plugin.models.modern_layers import ModernSize

# the library's names -> names in a checkpoint of mlsm_modern; all matrices have the same layout in both
NAMES = {
    "model.embeddings.tok_embeddings.weight": model_parts.EMBEDDINGS,
    "model.embeddings.norm.weight": f"{model_parts.ENCODER}embedding_norm.weight",
    "model.final_norm.weight": f"{model_parts.ENCODER}layer_norm.weight",
    "head.dense.weight": f"{model_parts.LM_HEAD}dense.weight",
    "head.norm.weight": f"{model_parts.LM_HEAD}layer_norm.weight",
    "decoder.weight": model_parts.OUTPUT,
    "decoder.bias": model_parts.OUTPUT_BIAS,
}
# the same of a layer; the first one has no norm before its attention
OF_LAYER = {
    "attn_norm": "attention_norm",
    "attn.Wqkv": "qkv_proj",
    "attn.Wo": "out_proj",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "fc1",
    "mlp.Wo": "fc2",
}


def modernbert_names(layers: int) -> dict[str, str]:
    """For each weight of a ``ModernBertForMaskedLM`` its name in a checkpoint of ``mlsm_modern``."""
    of_layers = {
        f"model.layers.{layer}.{theirs}.weight": f"{model_parts.LAYERS}{layer}.{ours}.weight"
        for layer in range(layers)
        for theirs, ours in OF_LAYER.items()
        if layer or theirs != "attn_norm"
    }
    return NAMES | of_layers


def modernbert_model(interface: Any, ids: Tensor) -> Any:
    """The ``transformers.ModernBertForMaskedLM`` with the weights of a model.

    Args:
        interface: a loaded model, see :func:`mlsm_plugin.hub.from_pretrained`.
        ids: for each id of the dictionary its id in the exported model, ``(len(dictionary),)``, a permutation.

    Raises:
        ValueError: the installed ``transformers`` is too old.
    """
    model_class = library_classes()[1]
    model = model_class(modernbert_config(interface, ids)).eval()
    model.load_state_dict(modernbert_weights(interface.model.state_dict(), ids))
    return model


def library_classes() -> tuple[Any, Any]:
    """``ModernBertConfig`` and ``ModernBertForMaskedLM`` of ``transformers``.

    Raises:
        ValueError: the installed version does not have them, or has them without a type for each layer.
    """
    try:
        from transformers import ModernBertConfig, ModernBertForMaskedLM
    except ImportError:
        raise ValueError("the installed transformers does not know ModernBERT; it needs version 5 or newer") from None
    if not hasattr(ModernBertConfig(), "layer_types"):
        raise ValueError("the installed transformers has another form of ModernBERT; it needs version 5 or newer")
    return ModernBertConfig, ModernBertForMaskedLM


def modernbert_config(interface: Any, ids: Tensor) -> Any:
    """The ``transformers.ModernBertConfig`` of the model; ``ids`` as of :func:`modernbert_model`."""
    encoder = model_parts.sentence_encoder(interface.model)
    size: ModernSize = encoder.size
    dictionary = interface.task.source_dictionary
    begin, end = int(ids[dictionary.bos()]), int(ids[dictionary.eos()])
    config_class = library_classes()[0]
    windows = {"local_attention": size.window} if size.window else {}
    return config_class(
        vocab_size=size.num_symbols,
        hidden_size=size.dim,
        intermediate_size=size.ffn_dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=int(interface.model.max_positions()),
        norm_eps=encoder.embedding_norm.eps,
        layer_types=[LOCAL if size.is_local(layer) else GLOBAL for layer in range(size.layers)],
        rope_parameters={
            GLOBAL: {"rope_type": "default", "rope_theta": size.theta},
            LOCAL: {"rope_type": "default", "rope_theta": size.local_theta},
        },
        embedding_dropout=size.dropout,
        attention_dropout=size.attention_dropout,
        mlp_dropout=size.activation_dropout,
        pad_token_id=int(ids[dictionary.pad()]),
        bos_token_id=begin,
        cls_token_id=begin,
        eos_token_id=end,
        sep_token_id=end,
        tie_word_embeddings=not getattr(interface.model.args, "untie_weights_roberta", False),
        **windows,
    )


def modernbert_weights(state: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Weights of ``ModernBertForMaskedLM`` from those of a model, float32.

    Args:
        state: state dict of the model.
        ids: as of :func:`modernbert_model`.
    """
    order = ids.argsort()
    found = {}
    for theirs, ours in modernbert_names(len(model_parts.layer_numbers(state))).items():
        values = state[ours].float()
        found[theirs] = values[order] if ours in model_parts.VOCABULARY_WEIGHTS else values
    return found
