"""Masked LMs that score sentences: fairseq checkpoints and Hugging Face folders, each with its own ids."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import hf_folder, is_hf, is_library_folder, weight_files
from mlsm_plugin.core.hidden_states.hf_encoder import load_masked_lm, model_and_tokenizer, positions_of
from mlsm_plugin.core.machine.devices import Device, default_device
from mlsm_plugin.core.text.unknown_tokens import UnknownTokens, unknown_tokens_in
from mlsm_plugin.fairseq_plugin.compat.training_options import why_untrained
from mlsm_plugin.hub import checkpoint_of, from_pretrained
from mlsm_plugin.huggingface.pretraining_model import head_of

if TYPE_CHECKING:
    from mlsm_plugin.hub.interface import MlsmHubInterface


class PairModel:
    """A model loaded by :func:`mlsm_plugin.hub.from_pretrained`; ValueError if its masked-LM head was not trained.

    ``mask`` and ``pad`` are ids, ``positions`` is the length of the longest sentence in tokens, and ``before`` and
    ``after`` are the numbers of special tokens before and after each sentence.
    """

    before = 1
    after = 1

    def __init__(self, interface: "MlsmHubInterface") -> None:
        if (why := why_untrained(interface.cfg)) is not None:
            raise ValueError(f"{why}: sentences cannot be scored")
        self._interface = interface
        self._dictionary = interface.task.source_dictionary
        self.mask = int(interface.task.mask_idx)
        self.pad = int(self._dictionary.pad())
        self.positions = int(interface.model.max_positions())
        self.device = interface.device

    def encode(self, text: str) -> Tensor:
        """Ids ``(T,)`` of a text, including the special tokens at its ends."""
        return torch.as_tensor(self._interface.encode(text))

    def logits(self, tokens: Tensor, masked: Tensor) -> Any:
        """Logits ``(n_masked, V)`` at the masked places (bool, ``(B, T)``) of right-padded ids ``(B, T)``."""
        return self._interface.model(tokens, masked_tokens=masked)[0]

    def unknown(self, texts: Iterable[str]) -> UnknownTokens:
        """Counts the unknown tokens of the texts of a file."""
        return unknown_tokens_in(texts, self._interface.bpe, self._dictionary)


class LibraryModel(PairModel):
    """A masked LM in a Hugging Face folder or on the hub, of a type that :class:`HuggingFaceEncoder` takes.

    ValueError if the model or its tokenizer cannot be read, they do not fit together, or either is not for masked LM.
    """

    def __init__(self, name: PathLike, device: Device = None) -> None:
        folder, config, self._tokenizer = model_and_tokenizer(name, weights=True)
        if self._tokenizer.mask_id is None:
            raise ValueError(f"the tokenizer of {folder} has no mask token; use the tokenizer of a masked LM")
        self.mask = self._tokenizer.mask_id
        self.pad = self._tokenizer.pad_id
        self.positions = positions_of(config)
        self.before = len(self._tokenizer.before)
        self.after = len(self._tokenizer.after)
        self.device = default_device(device)
        self._model = load_masked_lm(folder).eval().to(self.device)
        self._head = head_of(self._model)

    def encode(self, text: str) -> Tensor:
        ids, _ = self._tokenizer.encoded_text(text)
        return torch.tensor(self._tokenizer.surrounded(ids))

    def logits(self, tokens: Tensor, masked: Tensor) -> Any:
        hidden = self._model.base_model(input_ids=tokens, attention_mask=tokens.ne(self.pad).long())[0]
        return self._head.project(self._head.transform(hidden[masked]))

    def unknown(self, texts: Iterable[str]) -> UnknownTokens:
        unknown = UnknownTokens()
        for text in texts:
            unknown.add_text(self._tokenizer.unknown_of(text))
        return unknown


def is_library_model(name: PathLike) -> bool:
    """Whether it is a Hugging Face model, not a fairseq model; ValueError or FileNotFoundError if there is no model."""
    if is_hf(name) or is_library_folder(name):
        return bool(weight_files(hf_folder(name, weights=True)))
    if Path(name).suffix == ".json":  # `mlsm babylm train` writes one beside each model
        raise ValueError(f"{name} is not a model; to pass folders only, end the pattern with a slash, as in chck_*/")
    return not checkpoint_of(name)


def open_pair_model(name: PathLike, device: Device = None) -> PairModel:
    """Open a fairseq checkpoint, the folder of a run, or a Hugging Face model; errors as in the classes."""
    if is_library_model(name):
        return LibraryModel(name, device)
    interface = from_pretrained(name)
    interface.to(default_device(device))
    return PairModel(interface)
