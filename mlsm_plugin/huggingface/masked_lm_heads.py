"""The parts of a masked LM of Hugging Face: its encoder, and the two halves of its head."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mlsm_plugin.files.hf_files import hf_folder
from mlsm_plugin.hidden_states.hf_encoder import load_model

Step = Callable[[Tensor], Tensor]


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


def stock_masked_lm(path: str | os.PathLike[str]) -> Any:
    """An ``AutoModelForMaskedLM`` in float32, in which it is trained.

    Args:
        path: a folder or hub name.

    Raises:
        ValueError: the model does not exist, cannot be read, or has no trained masked-LM head.
    """
    model = load_model(hf_folder(path, weights=True), kind="AutoModelForMaskedLM").float()
    head_of(model)
    return model


def initialize(projection: nn.Linear, model: Any) -> None:
    """Initialize a new projection as the library initializes the linear layers of ``model``."""
    deviation = getattr(model.config, "initializer_range", 0.02)
    nn.init.normal_(projection.weight, std=deviation)
    nn.init.zeros_(projection.bias)
