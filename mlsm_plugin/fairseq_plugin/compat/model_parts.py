"""Parts, options and interface of fairseq's models, the names of their weights, and beam search."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import BaseFairseqModel
from fairseq.models.roberta.hub_interface import RobertaHubInterface
from fairseq.models.roberta.model import RobertaLMHead
from fairseq.models.transformer import TransformerEncoder
from fairseq.tasks import FairseqTask
from torch import Tensor, nn
from torch.nn import functional as F

from mlsm_plugin.core.masking.chosen_tokens import ChosenTokens
from mlsm_plugin.fairseq_plugin.compat.batches import Sample

Extra = dict[str, Any]  # output of a model besides logits, by name

# names in RoBERTa-like encoders
ENCODER = "encoder.sentence_encoder."
EMBEDDINGS = f"{ENCODER}embed_tokens.weight"
POSITIONS = f"{ENCODER}embed_positions.weight"
EMBEDDING_NORM = f"{ENCODER}layernorm_embedding"
LM_HEAD = "encoder.lm_head."
OUTPUT = f"{LM_HEAD}weight"
OUTPUT_BIAS = f"{LM_HEAD}bias"
ATOM_PROJECTION = f"{LM_HEAD}atom_projection."  # part of the latent head
LM_HEAD_PARTS = ("dense", "layer_norm")
# weights with a row for each symbol of the dictionary
VOCABULARY_WEIGHTS = (EMBEDDINGS, OUTPUT, OUTPUT_BIAS)
LAYERS = f"{ENCODER}layers."
# parts of a layer; each has a weight and a bias
LAYER_PARTS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention output": "self_attn.out_proj",
    "attention norm": "self_attn_layer_norm",
    "widening": "fc1",
    "narrowing": "fc2",
    "output norm": "final_layer_norm",
}
# in encoder-decoders
SOURCE_EMBEDDINGS = "encoder.embed_tokens.weight"


def layer_numbers(names: Iterable[str]) -> list[int]:
    """The ascending numbers, from 0, of the layers whose weights are among ``names``."""
    of_layers = [name.removeprefix(LAYERS) for name in names if name.startswith(LAYERS)]
    return sorted({int(name.split(".")[0]) for name in of_layers})


def unwrapped(model: BaseFairseqModel) -> BaseFairseqModel:
    """The model inside its wrappers for several devices."""
    while hasattr(model, "module"):
        model = model.module
    return model


def sentence_encoder(model: BaseFairseqModel) -> TransformerEncoder:
    """The ``TransformerEncoder`` of a model, which may be wrapped for several devices."""
    return unwrapped(model).encoder.sentence_encoder


def lm_head(model: BaseFairseqModel) -> RobertaLMHead:
    """The module that computes vocabulary logits from the last hidden states; the model may be wrapped."""
    return unwrapped(model).encoder.lm_head


def classification_heads(model: BaseFairseqModel) -> nn.ModuleDict:
    """The heads of a fine-tuned model by name; empty for a pre-trained model."""
    return getattr(model, "classification_heads", nn.ModuleDict())


def num_layers(encoder: TransformerEncoder) -> int:
    """The number of layers of a sentence encoder."""
    return len(encoder.layers)


def token_embeddings(encoder: TransformerEncoder) -> nn.Embedding:
    """The embeddings of the symbols."""
    return encoder.embed_tokens


def position_embeddings(encoder: TransformerEncoder) -> nn.Embedding | None:
    """The position embeddings; the first ``padding id + 1`` rows are unused. None if the model has none."""
    return encoder.embed_positions


def embedding_norm(encoder: TransformerEncoder) -> nn.LayerNorm | None:
    """The layer norm after the embeddings; None if the model has none."""
    return encoder.layernorm_embedding


def final_norm(encoder: TransformerEncoder) -> nn.LayerNorm | None:
    """The layer norm after the last layer; None if the model has none."""
    return encoder.layer_norm


def set_layer_norm_epsilon(model: BaseFairseqModel, epsilon: float) -> None:
    """Let all layer norms of a model, including apex's, add ``epsilon`` to the variance."""
    for part in model.modules():
        if hasattr(part, "normalized_shape"):
            part.eps = epsilon


def keep_first_layers(encoder: TransformerEncoder, number: int) -> TransformerEncoder:
    """Keep only the first ``number`` layers of ``encoder``; without the last layer, the final norm goes, too."""
    if number < num_layers(encoder):
        encoder.layer_norm = None
    encoder.layers = nn.ModuleList(list(encoder.layers)[:number])
    return encoder


def encoder_output(final: Tensor, states: list[Tensor]) -> dict[str, list[Tensor]]:
    """The output of a sentence encoder in the format of fairseq's ``TransformerEncoder``, from ``(B, T, dim)`` tensors.

    ``states`` are the embeddings and the output of each layer; empty if they were not requested.
    """
    return {"encoder_out": [final.transpose(0, 1)], "encoder_states": [state.transpose(0, 1) for state in states]}


def hidden_states_in(output: dict[str, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """The final hidden states ``(B, T, dim)`` in an output, and all others in fairseq's format, ``(T, B, dim)``."""
    return output["encoder_out"][0].transpose(0, 1), output["encoder_states"]


def last_hidden_states(encoder: TransformerEncoder, tokens: Tensor, selected: Tensor | None = None) -> Tensor:
    """The last layer's output of a sentence encoder, ``(B, T, dim)``, or ``(n, dim)`` for the ``selected`` tokens.

    ``tokens`` are ``(B, T)`` ids, right-padded; ``selected`` is bool ``(B, T)``. The last layer only computes these
    tokens if the encoder supports it.
    """
    if selected is not None and num_layers(encoder) and getattr(encoder, "can_choose_tokens", False):
        return hidden_states_in(encoder(tokens, only=ChosenTokens.of(selected)))[0].squeeze(0)
    hidden = hidden_states_in(encoder(tokens))[0]
    return hidden if selected is None else hidden[selected]


class Projected(NamedTuple):
    """The output of a model for the masked tokens of a batch."""

    targets: Tensor  # (N,) ids; ``pad`` fills the room after the masked tokens
    number: int | Tensor  # number of masked tokens
    logits: Tensor | None  # (N, V), if they were requested
    extra: Extra


def project_masked(model: BaseFairseqModel, sample: Sample, pad: int, **outputs: bool) -> Projected:
    """Run a model on a batch for its masked tokens, which have a target other than ``pad``.

    ``outputs`` are arguments of the model that choose its outputs. With ``masked_sizes`` in the batch
    (:func:`chosen_sizes`), nothing waits for a GPU.
    """
    target = sample["target"]
    masked = target.ne(pad)
    if not getattr(unwrapped(model).encoder, "can_choose_tokens", False):
        logits, extra = model(**sample["net_input"], masked_tokens=masked, **outputs)
        return Projected(target[masked], masked.sum(), logits, extra)
    sizes = sample.get("masked_sizes")
    only = ChosenTokens.of(masked, sizes)
    number = None if sizes is None else sizes[0]
    logits, extra = model(**sample["net_input"], only=only, **outputs)
    return Projected(target.flatten()[only.flat], masked.sum() if number is None else number, logits, extra)


def first_and_last_states(model: BaseFairseqModel, extra: Extra) -> tuple[Tensor, Tensor]:
    """Embeddings and final hidden states, ``(B, T, dim)`` each, from an output with ``return_all_hiddens``."""
    states = extra["inner_states"]
    norm = final_norm(sentence_encoder(model))
    last = extra["features"] if "features" in extra else states[-1].transpose(0, 1)
    return states[0].transpose(0, 1), last if "features" in extra or norm is None else norm(last)


@contextmanager
def changed_hidden_states(model: BaseFairseqModel, layer: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let ``change`` replace hidden state ``layer`` in each call of ``model`` while the context is open.

    Hidden state 0 is the embeddings. The hidden state of the last layer comes after the model's final norm. ``change``
    maps ``(B, T, dim)`` to ``(B, T, dim)``.
    """
    encoder = sentence_encoder(model)
    batch_first = getattr(encoder, "batch_first", False)

    def before_layer(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = arguments[0] if batch_first else arguments[0].transpose(0, 1)
        changed = change(hidden)
        return (changed if batch_first else changed.transpose(0, 1), *arguments[1:])

    def after_encoder(
        _module: nn.Module, _arguments: object, output: dict[str, list[Tensor]]
    ) -> dict[str, list[Tensor]]:
        return {**output, "encoder_out": [change(hidden_states_in(output)[0]).transpose(0, 1)]}

    if layer == num_layers(encoder):
        hook = encoder.register_forward_hook(after_encoder)
    else:
        hook = encoder.layers[layer].register_forward_pre_hook(before_layer)
    try:
        yield
    finally:
        hook.remove()


class DividedLMHead(RobertaLMHead):
    """RoBERTa's LM head, whose transform can also feed another projection; it makes a ``weight`` if that is None."""

    def __init__(self, embed_dim: int, output_dim: int, activation_fn: str, weight: nn.Parameter | None = None) -> None:
        super().__init__(embed_dim, output_dim, activation_fn, weight)
        self._has_own_weight = weight is None

    @property
    def width(self) -> int:
        """Width of the projections' input."""
        return int(self.dense.in_features)

    def transform(self, features: Tensor) -> Tensor:
        """The input of the projections, ``(..., embed_dim)``."""
        return self.layer_norm(self.activation_fn(self.dense(features)))

    def token_logits(self, transformed: Tensor) -> Tensor:
        """Vocabulary logits, in half precision under autocast."""
        if torch.is_autocast_enabled(transformed.device.type):  # the product is rounded; a sum in float32 adds nothing
            return F.linear(transformed, self.weight, self.bias)
        return F.linear(transformed, self.weight) + self.bias  # as in fairseq, to the bit

    def own_token_parameters(self) -> list[nn.Parameter]:
        """The parameters that only :meth:`token_logits` uses; a weight passed in belongs to the embeddings."""
        return [self.bias, self.weight] if self._has_own_weight else [self.bias]


class RobertaHub(RobertaHubInterface):
    """``RobertaHubInterface``: ``encode``, ``decode``, ``extract_features``, ``fill_mask``, ...

    ``task``, ``model`` and ``bpe`` are built from ``cfg``, the whole configuration of the checkpoint.
    """

    cfg: FairseqConfig
    task: FairseqTask
    model: BaseFairseqModel
    bpe: Any  # fairseq's tokenizers have no common class

    def has_classification_head(self, name: str) -> bool:
        """Whether the model was fine-tuned with a head named ``name``."""
        return name in classification_heads(self.model)

    @property
    def is_regression(self) -> bool:
        """Whether a fine-tuned model predicts numbers."""
        return bool(self.task.cfg.regression_target)

    def label(self, number: int) -> str:
        """The label that a logit of a fine-tuned model belongs to."""
        labels = self.task.label_dictionary
        return labels[labels.nspecial + number]


# options of RoBERTa about training and loading, not about its architecture
TRAINING_OPTIONS = frozenset({"dropout", "attention_dropout", "activation_dropout", "pooler_dropout"})
TRAINING_OPTIONS |= {"load_checkpoint_heads", "min_params_to_wrap"}


def flags_of(add_args: Callable[[argparse.ArgumentParser], object], cfg: FairseqConfig) -> list[str]:
    """The flags that set the options of a model class's ``add_args`` to the values in ``cfg``.

    Options that have their default are left out.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_args(parser)
    flags = []
    for action in parser._actions:
        value = getattr(cfg, action.dest, None)
        if value is None or value is False or value in ("", action.default):
            continue
        flags.append(action.option_strings[0])
        if action.nargs != 0:
            flags.append(str(value))
    return flags


def best_hypothesis(
    task: FairseqTask, model: BaseFairseqModel, source: Tensor, *, beam: int, max_length: int
) -> tuple[list[int], list[float]]:
    """The best target of an encoder-decoder in eval mode: ids, and their log-probabilities in nats.

    ``source`` is ids ``(T,)``, with EOS, on the model's device. ``beam`` hypotheses are kept, and the target has at
    most ``max_length`` tokens, without EOS.
    """
    options = argparse.Namespace(beam=beam, max_len_a=0, max_len_b=max_length)
    generator = task.build_generator([model], options)
    batch = {"src_tokens": source[None], "src_lengths": torch.tensor([len(source)], device=source.device)}
    best = task.inference_step(generator, [model], {"net_input": batch})[0][0]
    return best["tokens"].tolist(), best["positional_scores"].tolist()
