"""The targets of masked tokens, computed from the unmasked text during training, without a code store."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from fairseq.data import Dictionary
from torch import Tensor

from mlsm_plugin.core.coding.block_coding import TOKENS_TO_JUDGE_EMPTINESS
from mlsm_plugin.core.coding.coder_fit import fitting_encoder, fitting_fingerprint, fitting_layer
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.stored_codes import padded_distributions, strongest, without_negative_codes
from mlsm_plugin.fairseq_door.data.token_blocks import is_content, load_dictionary

logger = logging.getLogger(__name__)


class OnlineCodes:
    """Codes of the masked tokens of a batch, as ``mlsm encode`` would have stored them.

    Creating one reads only the dictionary; :meth:`load_encoder` reads the auxiliary model. Pickling leaves the model
    out, so that the copy reads it again when it needs it.

    Args:
        data_bin: folder with the ``dict.txt`` of the data.
        checkpoint: the auxiliary model, a file or a name with the prefix of a source.
        dictionary: folder of the coder, which ``mlsm dictionary`` wrote.
        layer: hidden state of the auxiliary model; None: the one that the coder was learned from.
        coder_options: options of this kind of coder; those left out have their defaults.
        fp16, tokens_per_sample, latent_top: as of :class:`CodingSettings` and its blocks.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the coder is not valid, does not say its layer although none is given, or lacks one of the options.
    """

    def __init__(
        self,
        data_bin: str | os.PathLike[str],
        *,
        checkpoint: str | os.PathLike[str],
        dictionary: str | os.PathLike[str],
        layer: int | None = None,
        coder_options: Mapping[str, Any] = MappingProxyType({}),
        fp16: bool = False,
        tokens_per_sample: int,
        latent_top: int | None = None,
    ) -> None:
        try:
            source_of(checkpoint).files_of(checkpoint)  # raises an error that says what is missing
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error} (--auxiliary-checkpoint)") from None
        self.data_bin, self.checkpoint = data_bin, checkpoint
        self.coder = load_coder(dictionary, **coder_options)
        self.settings = CodingSettings(
            fitting_layer(self.coder, layer, folder=dictionary, option="--latent-layer"),
            BlockSettings(tokens_per_sample),
            device="cpu",
            fp16=fp16,
            latent_top=latent_top,
        )
        self._encoder: HiddenStateEncoder | None = None
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "vocabulary"} | {"_encoder": None}

    @cached_property
    def vocabulary(self) -> Dictionary:
        """The symbols of the data."""
        return load_dictionary(self.data_bin)

    def load_encoder(self) -> HiddenStateEncoder:
        """The auxiliary model, read once; it stays on the CPU until the first batch decides the device.

        The state of torch's random generator stays as it was, so that a run draws the same numbers as with a store.
        ValueError if model, dictionary, vocabulary and settings do not belong together.
        """
        if self._encoder is None:
            fitting_fingerprint(self.checkpoint, self.coder, self.settings.layer)
            with torch.random.fork_rng(devices=[]):
                self._encoder = fitting_encoder(self.checkpoint, self.data_bin, self.coder, self.settings)
        return self._encoder

    @torch.no_grad()
    def codes_of_masked(self, src_tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Codes of the masked tokens in ``src_tokens``, ``(B, T)`` ids, right-padded.

        ``target`` ``(B, T)`` has the original ids of the masked tokens, padding elsewhere. ValueError if all codes of a
        large batch are empty, for example because lambda is too large.

        Returns:
            ``atoms`` (n_masked, m) int32 padded with -1 and ``weights`` (n_masked, m) float16 padded with 0, on the
            device of ``target``, in the order of ``target.ne(pad)``. The rows of special symbols are empty.
        """
        encoder = self.load_encoder()
        device = target.device
        if encoder.device != device:
            encoder.to(device)
        masked = target.ne(self.vocabulary.pad())
        original = torch.where(masked, target, src_tokens)
        coded = masked & is_content(original, self.vocabulary)
        atoms, weights = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float16)
        if bool(coded.any()):
            codes = self._encode(encoder.hidden_states_of(original, coded))
            atoms, weights = padded_distributions(strongest(codes, self.settings.latent_top))
        rows = coded[masked]  # (n_masked,)
        result = {
            "atoms": torch.full((len(rows), atoms.shape[1]), -1, dtype=torch.int32, device=device),
            "weights": torch.zeros(len(rows), atoms.shape[1], dtype=torch.float16, device=device),
        }
        result["atoms"][rows] = torch.from_numpy(atoms).to(device)
        result["weights"][rows] = torch.from_numpy(weights).to(device)
        return result

    def _encode(self, hidden: Tensor) -> sp.csr_matrix:
        """Codes ``(n, n_atoms)`` of hidden states ``(n, dim)``, computed where those are."""
        coded = self.coder.encode(hidden, threads=torch.get_num_threads())  # other ranks may share the cores
        inexact = self.coder.inexact(coded)
        if inexact is not None and not self._warned:
            self._warned = True
            logger.warning("%d of %d codes of a batch %s", len(inexact.rows), len(hidden), inexact.reason)
        codes = without_negative_codes(coded.codes)
        if codes.nnz == 0 and len(hidden) >= TOKENS_TO_JUDGE_EMPTINESS:
            why = self.coder.why_empty(hidden)
            raise ValueError(f"the codes of all {len(hidden)} masked tokens of a batch are empty, since {why}")
        return codes
