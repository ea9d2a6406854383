"""The interfaces of what computes hidden states, and of its sources."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike, sha256_of_files
from mlsm_plugin.core.files.sentence_modules import MEAN
from mlsm_plugin.core.losses.sentence_vectors import pooled_vectors
from mlsm_plugin.core.machine.devices import Device


class HiddenStateEncoder(ABC):
    """A model that computes a hidden state for each token of a batch."""

    device: torch.device  # where the hidden states are
    dim: int  # their width
    pooling: str = MEAN  # how the hidden states of a text become its vector: ``mean`` or ``cls``, the first one

    @abstractmethod
    def hidden_states(self, tokens: Tensor) -> Tensor:
        """``(B, T, dim)`` float32 on ``device``, for right-padded ids ``(B, T)`` of fairseq or of the blocks.

        A token about which the model knows nothing has no hidden state: its row is zero.

        On a CPU, ``mlsm encode`` calls this method or the next in several threads at once.
        """

    def hidden_states_of(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """``(n, dim)`` as for :meth:`hidden_states`, for the ``chosen`` tokens (bool ``(B, T)``) in order.

        A source may override this to save the cost of the other tokens.
        """
        return self.hidden_states(tokens)[chosen.to(self.device)]

    def text_vectors(self, tokens: Tensor, attended: Tensor) -> Tensor:
        """The vectors ``(B, dim)`` of the texts in right-padded rows of ids ``(B, T)``; zero for a row without ids.

        ``attended`` is bool ``(B, T)``, False for padding. ``dim`` and the ids are those of :meth:`hidden_states`.
        """
        return pooled_vectors(self.hidden_states(tokens), attended.to(self.device), self.pooling)


class HiddenStateSource(HiddenStateEncoder):
    """The layers of a trained encoder up to ``layer``, in eval mode.

    ``layer`` counts as in ``hidden_states[layer]``: 0 is the output of the embeddings, and the number of layers is the
    output of the last layer (after the final layer norm if the model has one).

    A subclass is a source of hidden states. Its class methods describe the model of a name on the command line
    without loading it. :func:`~mlsm_plugin.core.hidden_states.sources.register_source` registers it.

    Args:
        name: name of the model, as on the command line, with the prefix of the source.
        data_bin: binarized dataset with the ids that :meth:`hidden_states` will receive.
        device: None for the GPU if there is one.
        fp16: run in half precision: float16, on a CPU products in bfloat16; None: products in bfloat16 if the device
            is fast in it, else float32. Hidden states are float32.
    """

    layer: int
    num_layers: int  # of the whole model
    max_tokens: int  # longest sample in tokens, BOS included

    @abstractmethod
    def __init__(
        self, name: PathLike, data_bin: PathLike, *, layer: int, device: Device = None, fp16: bool | None = False
    ) -> None: ...

    @abstractmethod
    def to(self, device: str | torch.device) -> None:
        """Move the model to ``device``."""

    @classmethod
    @abstractmethod
    def files_of(cls, name: PathLike) -> list[Path]:
        """The files whose contents decide the hidden states; FileNotFoundError or ValueError if there are none."""

    @classmethod
    @abstractmethod
    def layers_of(cls, name: PathLike) -> int:
        """Number of layers of the model."""

    @classmethod
    @abstractmethod
    def usual_tokens_of(cls, name: PathLike) -> int:
        """Longest sample in tokens that the model can take and, if known, was trained on."""

    @classmethod
    @abstractmethod
    def tokenizer_of(cls, name: PathLike) -> str:
        """The value of ``mlsm binarize --tokenizer`` that produces the ids of the model."""

    @classmethod
    def width_of(cls, name: PathLike) -> int | None:
        """Width of the hidden states; None if it is not known before the model is loaded."""
        return None

    @classmethod
    def fingerprint_of(cls, name: PathLike) -> str:
        """SHA-256 of everything that decides the hidden states; here, of the model's files."""
        return sha256_of_files(*cls.files_of(name))


def check_layer(layer: int, num_layers: int, name: PathLike) -> None:
    """Raise ValueError unless a model of ``num_layers`` has hidden state ``layer``."""
    if not 0 <= layer <= num_layers:
        raise ValueError(
            f"--layer {layer} is out of range: {name} has {num_layers} layers, "
            f"so 0 (embeddings) to {num_layers} (last layer) exist"
        )
