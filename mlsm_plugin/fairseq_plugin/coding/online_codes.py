"""The targets of masked tokens, computed from the unmasked text during training, without a code store."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mlsm_plugin.core.coding.block_coding import store_meta
from mlsm_plugin.core.coding.coder_fit import check_width, fitting_fingerprint, fitting_layer
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.coding.state_codes import StateCodes
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.hidden_states.encoder import HiddenStateSource
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.hidden_states.sources import alignment_of
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.fairseq_plugin.coding.auxiliary_model import AuxiliaryModel, check_exists
from mlsm_plugin.fairseq_plugin.data.token_blocks import is_content


class OnlineCodes:
    """Codes of the masked tokens of a batch, the same as ``mlsm encode`` would store.

    The constructor only reads the dictionary; :meth:`load_encoder` reads the auxiliary model.

    Args:
        data_bin: folder with the ``dict.txt`` of the data.
        checkpoint: the auxiliary model, a file or a name with the prefix of a source.
        dictionary: folder of the coder, which ``mlsm dictionary`` wrote.
        layer: hidden state of the auxiliary model; None: the hidden state that the coder was learned from.
        coder_options: options of this kind of coder; options left out have their defaults.
        fp16: see :class:`HiddenStateSource`.
        tokens_per_sample, latent_top: see :class:`CodingSettings` and its blocks.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the coder is not valid, does not have an option, or ``layer`` is None and the coder does not record
            its layer.
    """

    def __init__(
        self,
        data_bin: PathLike,
        *,
        checkpoint: PathLike,
        dictionary: PathLike,
        layer: int | None = None,
        coder_options: Mapping[str, object] = MappingProxyType({}),
        fp16: bool | None = None,
        tokens_per_sample: int,
        latent_top: int | None = None,
    ) -> None:
        check_exists(checkpoint)
        self.coder = load_coder(dictionary, **coder_options)
        self.settings = CodingSettings(
            fitting_layer(self.coder, layer, folder=dictionary, option="--latent-layer"),
            BlockSettings(tokens_per_sample),
            device="cpu",
            latent_top=latent_top,
        )
        self._states = AuxiliaryModel(
            data_bin, checkpoint=checkpoint, layer=self.settings.layer, fp16=fp16, tokens_per_sample=tokens_per_sample
        )
        self._codes = StateCodes(self.coder, latent_top)
        self._is_checked = False

    def load_encoder(self) -> HiddenStateSource:
        """The auxiliary model; see :meth:`AuxiliaryModel.load_encoder`.

        ValueError if model, dictionary, vocabulary and settings do not belong together.
        """
        if not self._is_checked:
            model = fitting_fingerprint(self._states.checkpoint, self.coder, self.settings.layer)
            self.meta = store_meta(
                self.coder,
                self.settings,
                split="",
                auxiliary=model,
                blocks=None,
                alignment=alignment_of(self._states.checkpoint, self._states.data_bin),
            )
            check_width(self._states.load_encoder(), self.coder)
            self._is_checked = True
        return self._states.load_encoder()

    @torch.no_grad()
    def codes_of_masked(self, src_tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Codes of the masked tokens in ``src_tokens``, ``(B, T)`` ids, right-padded.

        ``target`` ``(B, T)`` has the original ids of the masked tokens, padding elsewhere. ValueError if all codes of a
        large batch are empty, for example because lambda is too large.

        Returns:
            ``atoms`` (n_masked, m) int32 padded with -1, and ``weights`` (n_masked, m) float16 padded with 0, on the
            device of ``target``, in the order of ``target.ne(pad)``. The rows of special symbols are empty.
        """
        self.load_encoder()
        vocabulary = self._states.vocabulary
        masked = target.ne(vocabulary.pad())
        words = target[masked]  # (n_masked,); waits for the GPU, which has little to do before
        if len(words) == 0:
            return {"atoms": words.new_zeros(0, 0, dtype=torch.int32), "weights": words.new_zeros(0, 0).half()}
        hidden = self._states.states(torch.where(masked, target, src_tokens), masked)
        return self._codes.of_states(hidden, is_content(words, vocabulary))
