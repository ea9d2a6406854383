"""The first layers of a Hugging Face encoder, for the library's own ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mlsm_plugin.files.hf_files import check_read, first_line, hf_folder, import_transformers
from mlsm_plugin.hidden_states.devices import default_device, half_products, placed
from mlsm_plugin.hidden_states.encoder import check_layer
from mlsm_plugin.tokenization.hf_tokenizer import HuggingFaceTokenizer

# Encoders whose output is that of their last layer, for ModernBERT after a norm; and among these the ones whose
# positions are numbered from the padding id + 1.
SUPPORTED = (
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
)
POSITIONS_AFTER_PADDING = ("camembert", "mpnet", "roberta", "xlm-roberta")
FEWEST_LAYERS = {"deberta-v2": 1, "modernbert": 1}  # where the library has no model without layers
# extra rows that an embedding may have after the vocabulary; a popular Italian BERT has 1,000
LARGEST_PADDING = 1024


class LibraryEncoder:
    """A BERT- or RoBERTa-like model of Hugging Face's ``transformers``, DeBERTa-v2 (and v3) or ModernBERT.

    Hidden state ``layer`` is the library's ``hidden_states[layer]`` with ``output_hidden_states=True``. Needs no
    fairseq.

    Args:
        name: a folder or hub name, with or without ``hf:``.
        layer: which hidden state.
        tokenizer: the tokenizer of the model; None: it lies beside the model.
        device: device of the model; None for the GPU if there is one.
        fp16: run in half precision: float16, on a CPU products in bfloat16. Hidden states are float32.
        check: called with the tokenizer before the weights are read; what it raises ends the opening.

    Attributes:
        tokenizer: the tokenizer.
        pad: the library's id of padding.
        layer, num_layers: which hidden state, and the layers of the whole model.
        max_tokens: longest sample in tokens, special tokens included.
        num_embeddings: all ids are smaller than this.
        dim: width of the hidden states.
        device: device of the model.

    Raises:
        ValueError: the model does not exist, its type is not in ``SUPPORTED``, weights are missing, the tokenizer does
            not fit the embeddings, or the layer is out of range.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        layer: int,
        tokenizer: HuggingFaceTokenizer | None = None,
        device: str | torch.device | None = None,
        fp16: bool = False,
        check: Callable[[HuggingFaceTokenizer], object] | None = None,
    ) -> None:
        folder = hf_folder(name, weights=True)
        config = supported_config(folder)
        self.layer, self.num_layers = layer, int(config.num_hidden_layers)
        check_layer(layer, self.num_layers, folder)
        self.tokenizer = tokenizer or HuggingFaceTokenizer(folder)
        self.pad = self.tokenizer.pad_id
        if check is not None:
            check(self.tokenizer)
        self.num_embeddings = int(config.vocab_size)
        check_vocabulary(self.tokenizer, self.num_embeddings, folder)
        self.max_tokens = positions_of(config)
        self.dim = int(config.hidden_size)
        self.device = default_device(device)
        self._model = load_model(folder, _first_layers(config, layer)).float().eval()
        if config.model_type == "modernbert" and layer < self.num_layers:
            self._model.final_norm = nn.Identity()  # follows the last layer only
        self._half = fp16
        self.to(self.device)

    def to(self, device: str | torch.device) -> None:
        """Move the model to ``device``."""
        self.device = torch.device(device)
        placed(self._model, self.device, half=self._half)

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, attended: Tensor | None = None) -> Tensor:
        """Hidden states of a batch.

        Args:
            tokens: ``(B, T)`` the library's ids, right-padded.
            attended: ``(B, T)`` bool, which of them are no padding; None: those that are not ``pad``.

        Returns:
            ``(B, T, dim)`` float32, on the model's device.
        """
        tokens = tokens.to(self.device)
        attended = tokens.ne(self.pad) if attended is None else attended.to(self.device)
        batch = {"input_ids": tokens, "attention_mask": attended.long()}
        with half_products(self.device, half=self._half):
            if self._model.config.num_hidden_layers > self.layer:
                found: Tensor = self._model(**batch, output_hidden_states=True).hidden_states[self.layer]
            else:
                found = self._model(**batch)[0]
        return found.float()


def supported_config(folder: Path, types: Sequence[str] = SUPPORTED) -> Any:
    """The configuration of a model; raises ValueError if its type is not among ``types``, or it is misread."""
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers has no common error for missing files, damaged files and unknown types
        raise ValueError(f"{folder} does not hold a Hugging Face model: {first_line(error)}") from None
    if config.model_type not in types:
        raise ValueError(f"{folder} is a model of type {config.model_type}; supported types: {', '.join(types)}")
    check_read(config, folder)
    return config


def _first_layers(config: Any, number: int) -> Any:
    """``config``, changed to that of a model of the first ``number`` layers, or of more if there is no such model."""
    number = max(number, FEWEST_LAYERS.get(config.model_type, 0))
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:number]
    config.num_hidden_layers = number
    return config


def positions_of(config: Any) -> int:
    """Longest sample in tokens that the model can take, or that it is made for if its positions are relative."""
    positions = int(config.max_position_embeddings)
    if config.model_type not in POSITIONS_AFTER_PADDING:
        return positions
    # mpnet uses 1, whatever the configuration says
    padding = 1 if config.model_type == "mpnet" else int(config.pad_token_id)
    return positions - padding - 1


def check_vocabulary(tokenizer: HuggingFaceTokenizer, rows: int, folder: Path) -> None:
    """Raise ValueError unless a model with ``rows`` embeddings can be that of the tokenizer."""
    needed = tokenizer.largest_id + 1
    if not needed <= rows < needed + LARGEST_PADDING:
        raise ValueError(
            f"{folder}: the tokenizer's ids need {needed} embeddings, the model has {rows}; use its own tokenizer"
        )


def load_model(folder: Path, config: Any, kind: str = "AutoModel") -> Any:
    """A model of the library; weights that are no part of it, such as those of later layers, are not loaded.

    Args:
        folder: holds the weights.
        config: of the model to make.
        kind: name of the library's class that makes it.

    Raises:
        ValueError: the weights cannot be read, have other shapes, or some of them are missing.
    """
    transformers = import_transformers()
    try:
        model, info = getattr(transformers, kind).from_pretrained(
            folder, config=config, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # transformers has no common error for damaged files and weights of other shapes
        raise ValueError(f"the weights of {folder} cannot be read: {first_line(error)}") from None
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name and "position_ids" not in name)
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of its model, such as {missing[0]}")
    return model
