"""The parts of a masked LM of Hugging Face: its encoder, and the two halves of its head."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mlsm_plugin.files.hf_files import first_line, hf_folder, import_transformers

Step = Callable[[Tensor], Tensor]
HEAD_OF_DEBERTA = "lm_predictions."  # the library reads it only if the configuration says that it is not "legacy"


@dataclass(frozen=True)
class Head:
    """The two halves of a masked-LM head.

    Attributes:
        transform: hidden states ``(n, d)`` to what the projection to the vocabulary reads, ``(n, width)``.
        project: what ``transform`` gives to vocabulary logits ``(n, V)``.
        width: width of what ``transform`` gives.
        bias: the parameter that only ``project`` reads: its weight may be that of the embeddings. None: there is none.
    """

    transform: Step
    project: Step
    width: int
    bias: nn.Parameter | None


def head_of(model: Any) -> Head:
    """The head of a masked LM: BERT, RoBERTa, MPNet, ModernBERT, DeBERTa-v2, DistilBERT, ELECTRA and their relatives.

    Raises:
        ValueError: the head has another form.
    """
    for find in (_bert, _deberta, _roberta, _modernbert, _distilbert, _electra):
        head = find(model)
        if head is not None:
            return head
    raise ValueError(
        f"the masked-LM head of {type(model).__name__} has a form that is not known; use a model like BERT, RoBERTa, "
        "ModernBERT, DeBERTa-v2, DistilBERT or ELECTRA"
    )


def _head(transform: Step, projection: nn.Linear) -> Head:
    return Head(transform, projection, projection.in_features, projection.bias)


def _part(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def _bert(model: Any) -> Head | None:
    head = _part(model, "cls.predictions")
    return None if head is None else _head(head.transform, head.decoder)


def _deberta(model: Any) -> Head | None:
    head = _part(model, "lm_predictions.lm_head")
    if head is None:
        return None
    embeddings = model.get_input_embeddings()
    return Head(
        lambda hidden: head.LayerNorm(head.transform_act_fn(head.dense(hidden))),
        lambda transformed: F.linear(transformed, embeddings.weight, head.bias),
        head.dense.out_features,
        head.bias,
    )


def _roberta(model: Any) -> Head | None:
    head = _part(model, "lm_head")
    if not all(hasattr(head, name) for name in ("dense", "layer_norm", "decoder")):
        return None
    return _head(lambda hidden: head.layer_norm(F.gelu(head.dense(hidden))), head.decoder)


def _modernbert(model: Any) -> Head | None:
    head, decoder = _part(model, "head"), _part(model, "decoder")
    return None if head is None or decoder is None else _head(head, decoder)


def _distilbert(model: Any) -> Head | None:
    project = _part(model, "vocab_projector")
    if project is None:
        return None
    return _head(lambda hidden: model.vocab_layer_norm(model.activation(model.vocab_transform(hidden))), project)


def _electra(model: Any) -> Head | None:
    project = _part(model, "generator_lm_head")
    return None if project is None else _head(model.generator_predictions, project)


def open_masked_lm(path: str | os.PathLike[str], **options: Any) -> Any:
    """An ``AutoModelForMaskedLM`` in float32, in which it is trained; code from the hub never runs.

    Args:
        path: a folder or hub name.
        options: passed on to ``from_pretrained``; with ``dtype``, the weights have that one.

    Raises:
        ValueError: the model does not exist, cannot be read, or has no trained masked-LM head.
    """
    transformers = import_transformers()
    folder = hf_folder(path, weights=True)
    try:
        model, info = transformers.AutoModelForMaskedLM.from_pretrained(
            folder, trust_remote_code=False, output_loading_info=True, **options
        )
    except Exception as error:  # transformers has no common error for missing and damaged files and unknown types
        raise ValueError(f"{folder} does not hold a masked LM of Hugging Face: {first_line(error)}") from None
    missing = sorted(info["missing_keys"])
    if missing and any(name.startswith(HEAD_OF_DEBERTA) for name in info["unexpected_keys"]):
        raise ValueError(
            f'{folder} has its masked-LM head in {HEAD_OF_DEBERTA}lm_head, as DeBERTa of its authors; set "legacy": '
            "false in its config.json"
        )
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of a masked LM, such as {missing[0]}; it was saved without its head"
        )
    head_of(model)
    return model if {"dtype", "torch_dtype"} & options.keys() else model.float()


def initialize(projection: nn.Linear, model: Any) -> None:
    """Initialize a new projection as the library initializes the linear layers of ``model``."""
    deviation = getattr(model.config, "initializer_range", 0.02)
    nn.init.normal_(projection.weight, std=deviation)
    nn.init.zeros_(projection.bias)
