"""The parts of fairseq's RoBERTa-like models, and the hidden states that the encoder in them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def sentence_encoder(model: Any) -> Any:
    """The ``TransformerEncoder`` of a model, also of one that is wrapped for several devices."""
    return model.encoder.sentence_encoder


def lm_head(model: Any) -> Any:
    """What makes vocabulary logits of the last hidden states."""
    return model.encoder.lm_head


def classification_heads(model: Any) -> Any:
    """The heads of a fine-tuned model by name; empty for a pre-trained one."""
    return getattr(model, "classification_heads", {})


def num_layers(encoder: Any) -> int:
    """Layers of a sentence encoder."""
    return len(encoder.layers)


def token_embeddings(encoder: Any) -> nn.Embedding:
    """The embeddings of the symbols."""
    return encoder.embed_tokens


def position_embeddings(encoder: Any) -> Any:
    """The embeddings of the positions, ``padding id + 1`` of them unused; None where the model has none."""
    return encoder.embed_positions


def embedding_norm(encoder: Any) -> Any:
    """The layer norm after the embeddings; None where the model has none."""
    return encoder.layernorm_embedding


def final_norm(encoder: Any) -> Any:
    """The layer norm after the last layer; None where the model has none."""
    return encoder.layer_norm


def keep_first_layers(encoder: Any, number: int) -> Any:
    """``encoder``, cut down to its first ``number`` layers; only after the last one comes the model's final norm."""
    if number < num_layers(encoder):
        encoder.layer_norm = None
    encoder.layers = nn.ModuleList(list(encoder.layers)[:number])
    return encoder


def encoder_output(final: Tensor, states: list[Tensor]) -> dict[str, Any]:
    """What a sentence encoder returns, in the form of fairseq's ``TransformerEncoder``.

    Args:
        final: ``(B, T, dim)``, the final hidden states.
        states: the embeddings and the output of each layer, ``(B, T, dim)``; empty if nobody asked for them.
    """
    return {"encoder_out": [final.transpose(0, 1)], "encoder_states": [state.transpose(0, 1) for state in states]}


def hidden_states_in(output: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The final hidden states ``(B, T, dim)`` in an output, and all others as fairseq gives them, ``(T, B, dim)``."""
    return output["encoder_out"][0].transpose(0, 1), output["encoder_states"]


def last_hidden_states(encoder: Any, tokens: Tensor, chosen: Tensor | None = None) -> Tensor:
    """What the last layer of a sentence encoder gives, of one without layers the embeddings.

    Args:
        tokens: ``(B, T)`` ids, right-padded, on the encoder's device.
        chosen: ``(B, T)`` bool, the hidden states of these n tokens only; an encoder that can computes no others in its
            last layer.

    Returns:
        ``(B, T, dim)``, or ``(n, dim)`` with ``chosen``.
    """
    if num_layers(encoder) == 0:  # fairseq 0.12.2 cannot run an encoder without layers
        hidden = encoder.forward_embedding(tokens)[0]
    elif chosen is not None and getattr(encoder, "can_choose_tokens", False):
        return hidden_states_in(encoder(tokens, chosen_tokens=chosen))[0].squeeze(0)
    else:
        hidden = hidden_states_in(encoder(tokens))[0]
    return hidden if chosen is None else hidden[chosen]


@contextmanager
def recorded_hidden_states(model: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The hidden states of each call of ``model`` while the context is open.

    Whatever wraps the model, only its forward is called. It has to be called with ``return_all_hiddens=True``.

    Yields:
        a list that each call makes longer: (embeddings, output of the last layer), both ``(T, B, dim)``.
    """
    recorded: list[tuple[Tensor, Tensor]] = []

    def record(_module: torch.nn.Module, _arguments: Any, output: dict[str, Any]) -> None:
        recorded.append((output["encoder_states"][0], output["encoder_out"][0]))

    hook = sentence_encoder(model).register_forward_hook(record)
    try:
        yield recorded
    finally:
        hook.remove()


@contextmanager
def changed_hidden_states(model: Any, layer: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let ``change`` replace hidden state ``layer`` in each call of ``model`` while the context is open.

    Hidden states are counted as in :func:`keep_first_layers`: 0 is the embeddings, and that of the last layer comes
    after the model's final norm.

    Args:
        model: whatever wraps its sentence encoder, only that one's forward and its layers are called.
        layer: number of the hidden state.
        change: from and to ``(B, T, dim)``.
    """
    encoder = sentence_encoder(model)
    batch_first = getattr(encoder, "batch_first", False)

    def before_layer(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = arguments[0] if batch_first else arguments[0].transpose(0, 1)
        changed = change(hidden)
        return (changed if batch_first else changed.transpose(0, 1), *arguments[1:])

    def after_encoder(_module: nn.Module, _arguments: Any, output: dict[str, Any]) -> dict[str, Any]:
        return {**output, "encoder_out": [change(hidden_states_in(output)[0]).transpose(0, 1)]}

    if layer == num_layers(encoder):
        hook = encoder.register_forward_hook(after_encoder)
    else:
        hook = encoder.layers[layer].register_forward_pre_hook(before_layer)
    fast = [each for each in encoder.layers if getattr(each, "ever_training", None) is False]
    for each in fast:  # the fused path of fairseq 0.12.2 runs batch first and without padding
        each.ever_training = True
    try:
        yield
    finally:
        hook.remove()
        for each in fast:
            each.ever_training = False
