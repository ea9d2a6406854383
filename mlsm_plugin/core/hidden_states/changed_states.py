"""Changing the hidden states of a layer within a Hugging Face model while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]


@contextmanager
def changed_library_states(encoder: Any, layer: int, change: Change) -> Iterator[None]:
    """A context in which ``change`` is applied to hidden state ``layer``, ``(B, T, dim)`` float32.

    ``encoder`` is the ``base_model`` of a model of a type in
    :data:`~mlsm_plugin.core.hidden_states.hf_encoder.SUPPORTED`, called with ``return_dict=True``. ValueError if its
    layers are not found.
    """
    change = in_float32(change)

    def before_layer(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(arguments[0]), *arguments[1:])

    def after_encoder(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        fields = {**output, "last_hidden_state": change(output[0])}
        return type(output)(**fields)

    layers = layers_of_library(encoder)
    if layer == len(layers):
        hook = encoder.register_forward_hook(after_encoder)
    elif layer == 0 and getattr(getattr(encoder, "encoder", None), "conv", None) is not None:
        hook = encoder.encoder.register_forward_pre_hook(before_layer)  # DeBERTa-v2's convolution also reads it
    else:
        hook = layers[layer].register_forward_pre_hook(before_layer)
    try:
        yield
    finally:
        hook.remove()


def layers_of_library(encoder: Any) -> nn.ModuleList:
    """The layers of a Hugging Face model; the first argument of each layer is the hidden states."""
    for place in ("encoder.layer", "transformer.layer", "layers"):
        module = encoder
        for part in place.split("."):
            module = getattr(module, part, None)
        if isinstance(module, nn.ModuleList):
            return module
    raise ValueError(f"the layers of {type(encoder).__name__} were not found in this version of transformers")


def in_float32(change: Change) -> Change:
    """A change of hidden states of any precision that is computed in float32."""
    return lambda hidden: change(hidden.float()).to(hidden.dtype)
