"""Masked LMs that score sentences: checkpoints of fairseq, and folders of Hugging Face, each with its own ids."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import hf_folder, is_hf, weight_files
from mlsm_plugin.core.hidden_states.devices import Device, default_device
from mlsm_plugin.core.hidden_states.hf_encoder import load_masked_lm, model_and_tokenizer, positions_of
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens, unknown_tokens_of
from mlsm_plugin.fairseq_door.seams.training_options import why_untrained
from mlsm_plugin.hub import checkpoint_of, from_pretrained
from mlsm_plugin.huggingface.pretraining_model import head_of


class PairModel(ABC):
    """A masked LM in eval mode, with its tokenizer."""

    mask: int  # ids
    pad: int
    positions: int  # longest sentence in tokens
    device: torch.device

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """Ids ``(T,)`` of a text, with the one that begins it and the one that ends it."""

    @abstractmethod
    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """Logits ``(n_masked, V)`` at the masked places (bool, ``(B, T)``) of right-padded ids ``(B, T)``."""

    @abstractmethod
    def unknown(self, texts: Iterable[str]) -> UnknownTokens:
        """The unknown tokens of texts."""


class CheckpointModel(PairModel):
    """A loaded model of :func:`mlsm_plugin.hub.from_pretrained`; ValueError if its masked-LM head was not trained."""

    def __init__(self, interface: Any) -> None:
        if (why := why_untrained(interface.cfg)) is not None:
            raise ValueError(f"{why}: sentences cannot be scored")
        self._interface, self._dictionary = interface, interface.task.source_dictionary
        self.mask, self.pad = interface.task.mask_idx, self._dictionary.pad()
        self.positions, self.device = int(interface.model.max_positions()), interface.device

    def encode(self, text: str) -> Tensor:
        found: Tensor = self._interface.encode(text)
        return found

    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        found: Tensor = self._interface.model(tokens, masked_tokens=masked)[0]
        return found

    def unknown(self, texts: Iterable[str]) -> UnknownTokens:
        return unknown_tokens_of(texts, self._interface.bpe, self._dictionary)


class LibraryModel(PairModel):
    """The masked LM in a folder of Hugging Face or of a hub name, of a type that :class:`LibraryEncoder` takes.

    ValueError if the model or its tokenizer cannot be read, they do not fit, or it has no trained masked-LM head.
    """

    def __init__(self, name: PathLike, device: Device = None) -> None:
        folder, config, self._tokenizer = model_and_tokenizer(name, weights=True)
        mask = self._tokenizer.mask_id
        if mask is None:
            raise ValueError(f"the tokenizer of {folder} has no mask token; use the tokenizer of a masked LM")
        self.mask, self.pad, self.positions = mask, self._tokenizer.pad_id, positions_of(config)
        self.device = default_device(device)
        self._model = load_masked_lm(folder).eval().to(self.device)
        self._head = head_of(self._model)

    def encode(self, text: str) -> Tensor:
        ids = self._tokenizer.backend.encode(text, add_special_tokens=False).ids
        return torch.tensor([self._tokenizer.begin_id, *ids, self._tokenizer.end_id])

    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        hidden = self._model.base_model(input_ids=tokens, attention_mask=tokens.ne(self.pad).long())[0]
        return self._head.project(self._head.transform(hidden[masked]))

    def unknown(self, texts: Iterable[str]) -> UnknownTokens:
        found = UnknownTokens()
        for text in texts:
            encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
            found.add(text, encoding.ids, encoding.offsets, self._tokenizer.unknown_id)
        return found


def is_library_model(name: PathLike) -> bool:
    """Whether a name is that of a Hugging Face model: ``hf:`` and more, or a folder with its ``config.json``."""
    return is_hf(name) or (Path(name, "config.json").is_file() and not any(Path(name).glob("*.pt")))


def check_there(name: PathLike) -> None:
    """Raise FileNotFoundError or ValueError unless a model lies at ``name``, before any work is done on others."""
    if is_library_model(name):
        weight_files(hf_folder(name, weights=True))
    else:
        checkpoint_of(name)


def open_pair_model(name: PathLike, device: Device = None) -> PairModel:
    """The model of a checkpoint, the folder of a run, or Hugging Face; errors as of the classes above."""
    if is_library_model(name):
        return LibraryModel(name, device)
    interface = from_pretrained(name)
    interface.to(default_device(device))
    return CheckpointModel(interface)
