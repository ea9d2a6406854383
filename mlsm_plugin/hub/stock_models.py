"""The stock models of Hugging Face that compute the same as our encoders: RoBERTa, ModernBERT, DeBERTa-v2."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.hf_files import GLOBAL, LOCAL
from mlsm_plugin.fairseq_plugin.compat import model_parts
from mlsm_plugin.fairseq_plugin.models.deberta_layers import EPSILON, DebertaSize, DebertaTransformer
from mlsm_plugin.fairseq_plugin.models.modern_layers import ModernSize, ModernTransformer
from mlsm_plugin.fairseq_plugin.tasks.base_masked_lm import BaseMaskedLMConfig

if TYPE_CHECKING:
    from mlsm_plugin.hub.interface import MlsmHubInterface

POSITIONS = "roberta.embeddings.position_embeddings.weight"
TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"
# prefix of RoBERTa's names -> prefix of BERT's names; the first that fits counts
OF_BERT = {
    "roberta.": "bert.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.": "cls.predictions.",
}
# by the keys of model_parts.LAYER_PARTS
OF_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention output": "attention.output.dense",
    "attention norm": "attention.output.LayerNorm",
    "widening": "intermediate.dense",
    "narrowing": "output.dense",
    "output norm": "output.LayerNorm",
}
# ModernBERT's names -> names in a checkpoint of mlsm_modern; all matrices have the same layout in both
NAMES = {
    "model.embeddings.tok_embeddings.weight": model_parts.EMBEDDINGS,
    "model.embeddings.norm.weight": f"{model_parts.ENCODER}embedding_norm.weight",
    "model.final_norm.weight": f"{model_parts.ENCODER}layer_norm.weight",
    "head.dense.weight": f"{model_parts.LM_HEAD}dense.weight",
    "head.norm.weight": f"{model_parts.LM_HEAD}layer_norm.weight",
    "decoder.weight": model_parts.OUTPUT,
    "decoder.bias": model_parts.OUTPUT_BIAS,
}
# the same for the parts of a layer; the first layer has no norm before its attention
OF_MODERN_LAYER = {
    "attn_norm": "attention_norm",
    "attn.Wqkv": "qkv_proj",
    "attn.Wo": "out_proj",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "fc1",
    "mlp.Wo": "fc2",
}
# The same for DebertaV2; each part has a weight and a bias. Our model joins the three projections in one matrix.
OF_DEBERTA_LAYER = {
    "attention.self.query_proj": "query",
    "attention.self.key_proj": "key",
    "attention.self.value_proj": "value",
    "attention.output.dense": "out_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "ffn_norm",
}
DEBERTA_HEADS = {  # dense layer and norm of the library's two heads, by its setting `legacy`
    True: ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    False: ("lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm"),
}
JOINT = "qkv_proj"
PARTS = ("query", "key", "value")
# settings of a DebertaV2 that computes the same as our model
OF_MLSM_DEBERTA: dict[str, Any] = {
    **dict.fromkeys(("relative_attention", "share_att_key", "tie_word_embeddings"), True),
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
    "hidden_act": "gelu",
    "layer_norm_eps": EPSILON,
}


def stock_model(interface: "MlsmHubInterface", ids: Tensor) -> Any:
    """Hugging Face's model that computes the same as ours.

    It is a ``RobertaForMaskedLM``, a ``ModernBertForMaskedLM`` or a ``DebertaV2ForMaskedLM``. ``interface`` is a loaded
    model. ``ids`` ``(len(dictionary),)``, a permutation, holds the id in the exported model for each id of the
    dictionary. ValueError if stock RoBERTa lacks a part of the model, or transformers is too old.
    """
    from transformers import DebertaV2ForMaskedLM, RobertaForMaskedLM

    state = interface.model.state_dict()
    encoder = model_parts.sentence_encoder(interface.model)
    if isinstance(encoder, DebertaTransformer):
        model: Any = DebertaV2ForMaskedLM(deberta_config(interface, ids))
        weights = deberta_weights(state, ids)
    elif isinstance(encoder, ModernTransformer):
        model = library_classes()[1](modernbert_config(interface, ids))
        weights = modernbert_weights(state, ids)
    else:
        model = RobertaForMaskedLM(roberta_config(interface, ids))
        weights = roberta_weights(state, ids, interface.task.source_dictionary.pad())
    model.load_state_dict(weights)
    return model.eval()


def roberta_config(interface: "MlsmHubInterface", ids: Tensor) -> Any:
    """The ``transformers.RobertaConfig``; arguments and errors as for :func:`stock_model`."""
    from transformers import RobertaConfig

    args = interface.model.args
    encoder = model_parts.sentence_encoder(interface.model)
    positions = model_parts.position_embeddings(encoder)
    norm = model_parts.embedding_norm(encoder)
    if getattr(args, "encoder_normalize_before", False) or model_parts.final_norm(encoder) is not None:
        raise ValueError(
            "a model with --encoder-normalize-before cannot be exported: stock RoBERTa lacks its layer norms"
        )
    if norm is None or positions is None:
        raise ValueError(
            "a model without embedding layer norm or learned positions cannot be exported: stock RoBERTa has both"
        )
    dictionary = interface.task.source_dictionary
    pad = int(ids[dictionary.pad()])
    return RobertaConfig(
        vocab_size=len(dictionary),
        hidden_size=args.encoder_embed_dim,
        num_hidden_layers=model_parts.num_layers(encoder),
        num_attention_heads=args.encoder_attention_heads,
        intermediate_size=args.encoder_ffn_embed_dim,
        hidden_act=args.activation_fn,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.attention_dropout,
        max_position_embeddings=positions.num_embeddings - dictionary.pad() + pad,
        type_vocab_size=1,
        layer_norm_eps=norm.eps,
        pad_token_id=pad,
        bos_token_id=int(ids[dictionary.bos()]),
        eos_token_id=int(ids[dictionary.eos()]),
        tie_word_embeddings=not getattr(args, "untie_weights_roberta", False),
    )


def roberta_names(layers: Iterable[int]) -> dict[str, str]:
    """The name in a checkpoint of ``mlsm_roberta`` for each weight of a ``RobertaForMaskedLM`` except
    :data:`TOKEN_TYPES`; ``layers`` are the numbers of the layers.
    """
    pairs = [("roberta.embeddings.LayerNorm", model_parts.EMBEDDING_NORM)]
    pairs += [(f"lm_head.{name}", f"{model_parts.LM_HEAD}{name}") for name in model_parts.LM_HEAD_PARTS]
    for layer in layers:
        pairs += [
            (f"roberta.encoder.layer.{layer}.{OF_LAYER[part]}", f"{model_parts.LAYERS}{layer}.{ours}")
            for part, ours in model_parts.LAYER_PARTS.items()
        ]
    return {
        "roberta.embeddings.word_embeddings.weight": model_parts.EMBEDDINGS,
        POSITIONS: model_parts.POSITIONS,
        "lm_head.decoder.weight": model_parts.OUTPUT,
        **dict.fromkeys(("lm_head.bias", "lm_head.decoder.bias"), model_parts.OUTPUT_BIAS),  # the last one counts
        **{f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in pairs for kind in ("weight", "bias")},
    }


def bert_name(name: str) -> str:
    """The name in a ``BertForMaskedLM`` of a weight of a ``RobertaForMaskedLM``."""
    old, new = next(pair for pair in OF_BERT.items() if name.startswith(pair[0]))
    return new + name.removeprefix(old)


def roberta_weights(state: Mapping[str, Tensor], ids: Tensor, pad: int) -> dict[str, Tensor]:
    """Weights of ``RobertaForMaskedLM`` from the state dict of a model; ``ids`` as for :func:`stock_model`.

    Positions begin after the dictionary's padding id ``pad``; in the exported model, after ``ids[pad]``.
    """
    weights = renamed(state, roberta_names(model_parts.layer_numbers(state)), ids.argsort())
    positions = weights[POSITIONS]
    unused = positions.new_zeros(int(ids[pad]) + 1, positions.size(1))
    weights[POSITIONS] = torch.cat([unused, positions[pad + 1 :]])
    weights[TOKEN_TYPES] = torch.zeros(1, positions.size(1))
    return weights


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str], rows: Tensor) -> dict[str, Tensor]:
    """Weights by new names (``names``: new to old), float32; ``rows`` reorders weights with a row per symbol."""
    of_symbols = {*model_parts.VOCABULARY_WEIGHTS}
    return {new: (state[old][rows] if of_symbols & {new, old} else state[old]).float() for new, old in names.items()}


def encoder_flags(model: Any, config: Any, positions: int, options: Mapping[str, Any]) -> list[str]:
    """Flags of ``fairseq-train`` that make an encoder of the class ``model`` from a Hugging Face configuration.

    ``options`` are the options of the model besides its size. Samples have the default length, or the longest that the
    model can take if that is less.
    """
    values = {
        "encoder_layers": int(config.num_hidden_layers),
        "encoder_embed_dim": int(config.hidden_size),
        "encoder_ffn_embed_dim": int(config.intermediate_size),
        "encoder_attention_heads": int(config.num_attention_heads),
        "max_positions": positions,
        **options,
    }
    flags = model_parts.flags_of(model.add_args, Namespace(**values))
    return [*flags, "--tokens-per-sample", str(min(positions, int(BaseMaskedLMConfig.tokens_per_sample)))]


def modernbert_names(layers: int) -> dict[str, str]:
    """The name in a checkpoint of ``mlsm_modern`` for each weight of a ``ModernBertForMaskedLM``."""
    of_layers = {
        f"model.layers.{layer}.{theirs}.weight": f"{model_parts.LAYERS}{layer}.{ours}.weight"
        for layer in range(layers)
        for theirs, ours in OF_MODERN_LAYER.items()
        if layer or theirs != "attn_norm"
    }
    return NAMES | of_layers


def library_classes() -> tuple[Any, Any]:
    """``ModernBertConfig`` and ``ModernBertForMaskedLM``; ValueError if they are missing or have no layer types."""
    try:
        from transformers import ModernBertConfig, ModernBertForMaskedLM
    except ImportError:
        raise ValueError("the installed transformers does not know ModernBERT; it needs version 5 or newer") from None
    if not hasattr(ModernBertConfig(), "layer_types"):
        raise ValueError("the installed transformers has another form of ModernBERT; it needs version 5 or newer")
    return ModernBertConfig, ModernBertForMaskedLM


def modernbert_config(interface: "MlsmHubInterface", ids: Tensor) -> Any:
    """The ``transformers.ModernBertConfig``; arguments and errors as for :func:`stock_model`."""
    encoder = model_parts.sentence_encoder(interface.model)
    dictionary = interface.task.source_dictionary
    size: ModernSize = encoder.size
    begin = int(ids[dictionary.bos()])
    end = int(ids[dictionary.eos()])
    windows = {"local_attention": size.window} if size.window else {}
    return library_classes()[0](
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


def modernbert_weights(state: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Weights of ``ModernBertForMaskedLM`` from the state dict of a model; ``ids`` as for :func:`stock_model`."""
    return renamed(state, modernbert_names(len(model_parts.layer_numbers(state))), ids.argsort())


def deberta_names(layers: int, *, legacy: bool = True) -> dict[str, str]:
    """The name in the result of :func:`divided` for each weight of a ``DebertaV2ForMaskedLM``.

    ``legacy`` is a setting of the library: which of its two heads the model has.
    """
    dense, norm = DEBERTA_HEADS[legacy]
    pairs = {
        "deberta.embeddings.LayerNorm": f"{model_parts.ENCODER}embedding_norm",
        "deberta.encoder.LayerNorm": f"{model_parts.ENCODER}distance_norm",
        dense: f"{model_parts.LM_HEAD}dense",
        norm: f"{model_parts.LM_HEAD}layer_norm",
    }
    pairs |= {
        f"deberta.encoder.layer.{layer}.{theirs}": f"{model_parts.LAYERS}{layer}.{ours}"
        for layer in range(layers)
        for theirs, ours in OF_DEBERTA_LAYER.items()
    }
    biases = ("cls.predictions.bias", "cls.predictions.decoder.bias") if legacy else ("lm_predictions.lm_head.bias",)
    return {
        "deberta.embeddings.word_embeddings.weight": model_parts.EMBEDDINGS,
        "deberta.encoder.rel_embeddings.weight": f"{model_parts.ENCODER}embed_distances.weight",
        **({"cls.predictions.decoder.weight": model_parts.OUTPUT} if legacy else {}),
        **dict.fromkeys(biases, model_parts.OUTPUT_BIAS),
        **{f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in pairs.items() for kind in ("weight", "bias")},
    }


def divided(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of ``mlsm_deberta`` with separate projections to queries, keys and values."""
    weights = dict(state)
    for name in [name for name in state if JOINT in name]:
        parts = zip(PARTS, weights.pop(name).chunk(len(PARTS)), strict=True)
        weights |= {name.replace(JOINT, part): rows for part, rows in parts}
    return weights


def joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`divided`."""
    parts_of_name: dict[str, list[Tensor]] = {}
    for name, values in state.items():
        for part in PARTS:
            name = name.replace(f".{part}.", f".{JOINT}.")
        parts_of_name.setdefault(name, []).append(values)
    return {name: torch.cat(values) for name, values in parts_of_name.items()}


def deberta_weights(state: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Weights of ``DebertaV2ForMaskedLM`` from the state dict of a model; ``ids`` as for :func:`stock_model`."""
    return renamed(divided(state), deberta_names(len(model_parts.layer_numbers(state))), ids.argsort())


def deberta_config(interface: "MlsmHubInterface", ids: Tensor) -> Any:
    """The ``transformers.DebertaV2Config``; arguments as for :func:`stock_model`."""
    from transformers import DebertaV2Config

    size: DebertaSize = model_parts.sentence_encoder(interface.model).size
    dictionary = interface.task.source_dictionary
    begin = int(ids[dictionary.bos()])
    end = int(ids[dictionary.eos()])
    special = {"bos_token_id": begin, "cls_token_id": begin, "eos_token_id": end, "sep_token_id": end}
    special["pad_token_id"] = int(ids[dictionary.pad()])
    settings: dict[str, Any] = {**OF_MLSM_DEBERTA, **special, "position_buckets": size.buckets or -1}
    return DebertaV2Config(
        vocab_size=size.num_symbols,
        hidden_size=size.dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn_dim,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.attention_dropout,
        max_position_embeddings=int(interface.model.max_positions()),
        max_relative_positions=size.longest,
        **settings,
    )
