"""Hidden states of one layer of a Hugging Face encoder, for fairseq's ids."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from mlsm_plugin.files.hf_files import hf_folder, weight_files
from mlsm_plugin.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.hidden_states.library_encoder import (
    FEWEST_LAYERS,
    LARGEST_PADDING,
    POSITIONS_AFTER_PADDING,
    SUPPORTED,
    LibraryEncoder,
    check_vocabulary,
    load_model,
    positions_of,
    supported_config,
)

__all__ = [
    "FEWEST_LAYERS",
    "LARGEST_PADDING",
    "POSITIONS_AFTER_PADDING",
    "SUPPORTED",
    "HuggingFaceEncoder",
    "check_vocabulary",
    "load_model",
    "supported_config",
]


class HuggingFaceEncoder(HiddenStateEncoder):
    """A BERT- or RoBERTa-like model of Hugging Face's ``transformers``, DeBERTa-v2 (and v3) or ModernBERT.

    Hidden state ``layer`` is the library's ``hidden_states[layer]`` with ``output_hidden_states=True``.

    Args:
        name: ``hf:`` followed by a folder or hub name.
        data_bin: dataset that ``mlsm binarize --tokenizer`` made with the tokenizer of the model.
        layer: which hidden state.
        device: device of the model; None for the GPU if there is one.
        fp16: run in half precision: float16, on a CPU products in bfloat16. Hidden states are float32.

    Raises:
        ValueError: the model does not exist, its type is not in ``SUPPORTED``, weights are missing, its tokenizer does
            not fit the dataset or the embeddings, or the layer is out of range.
        FileNotFoundError: the dataset does not exist.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        data_bin: str | os.PathLike[str],
        *,
        layer: int,
        device: str | torch.device | None = None,
        fp16: bool = False,
    ) -> None:
        from mlsm_plugin.data.token_blocks import load_dictionary  # these need fairseq
        from mlsm_plugin.tokenization.text_tokenizer import check_dictionary

        self.dictionary = load_dictionary(data_bin)
        self._encoder = LibraryEncoder(
            name, layer=layer, device=device, fp16=fp16, check=lambda found: check_dictionary(found, Path(data_bin))
        )
        self.layer, self.num_layers = layer, self._encoder.num_layers
        self.max_tokens, self.dim = self._encoder.max_tokens, self._encoder.dim
        self._ids = torch.from_numpy(self._encoder.tokenizer.hf_ids)
        self.to(self._encoder.device)

    def to(self, device: str | torch.device) -> None:
        """Move the model to ``device``."""
        self._encoder.to(device)
        self.device = self._encoder.device
        self._ids = self._ids.to(self.device)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Hidden states ``(B, T, dim)``, float32, of fairseq's ids ``(B, T)``."""
        tokens = tokens.to(self.device)
        return self._encoder.hidden_states(self._ids[tokens], tokens.ne(self.dictionary.pad()))

    @classmethod
    def files_of(cls, name: str | os.PathLike[str]) -> list[Path]:
        """The configuration and the weights."""
        folder = hf_folder(name, weights=True)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} does not hold a Hugging Face model: config.json is missing")
        return [folder / "config.json", *weight_files(folder)]

    @classmethod
    def layers_of(cls, name: str | os.PathLike[str]) -> int:
        """Number of layers of the model."""
        return int(supported_config(hf_folder(name)).num_hidden_layers)

    @classmethod
    def usual_tokens_of(cls, name: str | os.PathLike[str]) -> int:
        """The model's positions."""
        return positions_of(supported_config(hf_folder(name)))

    @classmethod
    def width_of(cls, name: str | os.PathLike[str]) -> int | None:
        """Width of the hidden states, as the configuration says."""
        return int(supported_config(hf_folder(name)).hidden_size)

    @classmethod
    def tokenizer_of(cls, name: str | os.PathLike[str]) -> str:
        """The model itself, which comes with its tokenizer."""
        return os.fspath(name)
