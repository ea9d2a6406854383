"""Hidden states of tokens, and vectors of texts, which an auxiliary model computes of batches in training."""

from functools import cached_property

import torch
from fairseq.data import Dictionary
from torch import Tensor

from mlsm_plugin.core.coding.coder_fit import check_sample_length
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.hidden_states.encoder import HiddenStateSource
from mlsm_plugin.core.hidden_states.sources import open_encoder, source_of
from mlsm_plugin.fairseq_plugin.data.token_blocks import load_dictionary


class AuxiliaryModel:
    """The auxiliary model of a training, on the device of its batches.

    The constructor only checks that the auxiliary model exists; :meth:`load_encoder` reads it. Pickling leaves out the
    model; the copy reads it again when needed.

    Args:
        data_bin: folder with the ``dict.txt`` of the data.
        checkpoint: the auxiliary model, a file or a name with the prefix of a source.
        layer: hidden state of the auxiliary model; None: the last.
        fp16: see :class:`HiddenStateSource`.
        tokens_per_sample: longest sample that is read.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
    """

    def __init__(
        self,
        data_bin: PathLike,
        *,
        checkpoint: PathLike,
        layer: int | None = None,
        fp16: bool | None = None,
        tokens_per_sample: int,
    ) -> None:
        check_exists(checkpoint)
        self.data_bin = data_bin
        self.checkpoint = checkpoint
        self.layer = source_of(checkpoint).layers_of(checkpoint) if layer is None else layer
        self.tokens_per_sample = tokens_per_sample
        self._fp16 = fp16
        self._encoder: HiddenStateSource | None = None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "vocabulary"} | {"_encoder": None}

    @cached_property
    def vocabulary(self) -> Dictionary:
        """The symbols of the data."""
        return load_dictionary(self.data_bin)

    def load_encoder(self) -> HiddenStateSource:
        """The auxiliary model, read once; it stays on the CPU until the first batch decides the device.

        The state of torch's random generator does not change. ValueError if model, vocabulary and length of the samples
        do not belong together.
        """
        if self._encoder is None:
            with torch.random.fork_rng(devices=[]):
                encoder = open_encoder(self.checkpoint, self.data_bin, layer=self.layer, device="cpu", fp16=self._fp16)
            check_sample_length(encoder, self.tokens_per_sample)
            self._encoder = encoder
        return self._encoder

    @torch.no_grad()
    def states(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Hidden states ``(n, dim)`` of the ``chosen`` tokens, in order; ``(B, T)`` ids, right-padded, and bool."""
        return self._on(tokens.device).hidden_states_of(tokens, chosen)

    @torch.no_grad()
    def text_vectors(self, tokens: Tensor) -> Tensor:
        """The vectors ``(B, dim)`` of the texts in rows of ids ``(B, T)``, right-padded."""
        return self._on(tokens.device).text_vectors(tokens, tokens.ne(self.vocabulary.pad()))

    def _on(self, device: torch.device) -> HiddenStateSource:
        encoder = self.load_encoder()
        if encoder.device != device:
            encoder.to(device)
        return encoder


def check_exists(checkpoint: PathLike) -> None:
    """Raise FileNotFoundError if an auxiliary model does not exist."""
    try:
        source_of(checkpoint).files_of(checkpoint)  # raises an error that says what is missing
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} (--auxiliary-checkpoint)") from None
