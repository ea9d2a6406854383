"""Masked LMs of fairseq and Hugging Face, in which the hidden states of a layer can be replaced."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import hf_folder
from mlsm_plugin.core.hidden_states.changed_states import Change, changed_library_states, in_float32
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource, half_of, load_masked_lm, supported_config
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.core.machine.devices import Device, default_device, half_products, placed
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder, load_roberta
from mlsm_plugin.fairseq_plugin.compat.model_parts import changed_hidden_states
from mlsm_plugin.fairseq_plugin.compat.training_options import why_untrained
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary


class NoMaskedLmError(ValueError):
    """The model predicts no masked tokens; the message says why."""


class MaskedLm(ABC):
    """A masked LM in eval mode."""

    dictionary: Dictionary  # fairseq's dictionary of the data, with <mask>
    device: torch.device
    _model: Any
    _half: bool

    def to(self, device: str | torch.device) -> None:
        """Move the model to ``device``."""
        self.device = torch.device(device)
        placed(self._model, self.device, half=self._half)

    @abstractmethod
    def changed(self, layer: int, change: Change) -> Any:
        """A context in which ``change`` is applied to hidden state ``layer``, ``(B, T, dim)`` float32."""

    @abstractmethod
    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """Logits ``(n_masked, V)`` of the ``masked`` tokens (bool, ``(B, T)``) of fairseq's ids ``(B, T)``."""

    @abstractmethod
    def columns(self, tokens: Tensor) -> Tensor:
        """The columns of the logits for fairseq's ids."""

    @torch.no_grad()
    def losses(self, tokens: Tensor, masked: Tensor, targets: Tensor) -> Tensor:
        """Cross entropies ``(n_masked,)`` float64 of the ``masked`` tokens (bool ``(B, T)``), in nats, on the CPU.

        ``tokens`` and ``targets`` are fairseq's ids ``(B, T)``, right-padded, with and without masks.
        """
        tokens = tokens.to(self.device)
        masked = masked.to(self.device)
        targets = targets.to(self.device)
        log_probabilities = self.logits(tokens, masked).double().log_softmax(dim=1)
        return -log_probabilities.gather(1, self.columns(targets[masked])[:, None]).squeeze(1).cpu()


class FairseqMaskedLm(MaskedLm):
    """A RoBERTa-like fairseq model with its head; arguments and errors as in :func:`open_masked_lm`."""

    def __init__(self, name: PathLike, data_bin: PathLike, *, device: Device = None, fp16: bool = False) -> None:
        self.dictionary = load_dictionary(data_bin)
        model, cfg = load_roberta(name, data_bin, self.dictionary)
        if (why := why_untrained(cfg)) is not None:
            raise NoMaskedLmError(why)
        self._model = model.eval()
        self._half = fp16
        self.to(default_device(device))

    def changed(self, layer: int, change: Change) -> Any:
        return changed_hidden_states(self._model, layer, in_float32(change))

    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        with half_products(self.device, half=self._half):
            logits: Tensor = self._model(tokens, masked_tokens=masked)[0]
        return logits

    def columns(self, tokens: Tensor) -> Tensor:
        return tokens


class HuggingFaceMaskedLm(MaskedLm):
    """A masked LM of a type that :class:`HuggingFaceSource` takes; arguments as in :func:`open_masked_lm`."""

    def __init__(self, name: PathLike, data_bin: PathLike, *, device: Device = None, fp16: bool = False) -> None:
        self.dictionary = load_dictionary(data_bin)
        folder = hf_folder(name, weights=True)
        config = supported_config(folder)
        try:
            self._model = load_masked_lm(folder).eval()
        except ValueError as error:
            raise NoMaskedLmError(str(error)) from None
        self._half = bool(half_of(config, fp16))
        self._ids = torch.from_numpy(HuggingFaceTokenizer(folder).hf_ids)
        self.to(default_device(device))

    def to(self, device: str | torch.device) -> None:
        super().to(device)
        self._ids = self._ids.to(self.device)

    def changed(self, layer: int, change: Change) -> Any:
        return changed_library_states(self._model.base_model, layer, change)

    def logits(self, tokens: Tensor, masked: Tensor) -> Tensor:
        attended = tokens.ne(self.dictionary.pad()).long()
        with half_products(self.device, half=self._half):
            logits: Tensor = self._model(input_ids=self._ids[tokens], attention_mask=attended, return_dict=True).logits
        return logits[masked]

    def columns(self, tokens: Tensor) -> Tensor:
        return self._ids[tokens]


def open_masked_lm(name: PathLike, data_bin: PathLike, *, device: Device = None, fp16: bool = False) -> MaskedLm:
    """Open the masked LM of this name; arguments as in :class:`HiddenStateSource`.

    NoMaskedLmError if the model is not a masked LM, its head was not trained, or its kind of source has no head;
    FileNotFoundError or ValueError if it cannot be opened.
    """
    source = source_of(name)
    kinds = {FairseqEncoder: FairseqMaskedLm, HuggingFaceSource: HuggingFaceMaskedLm}
    if source not in kinds:
        raise NoMaskedLmError(f"{source.__name__} gives hidden states only, not the predictions of a masked LM")
    return kinds[source](name, data_bin, device=device, fp16=fp16)
