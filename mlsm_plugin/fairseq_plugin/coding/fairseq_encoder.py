"""Hidden states of one layer of a fairseq RoBERTa-like checkpoint."""

from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import BaseFairseqModel
from torch import Tensor

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.model_files import DICTIONARY_NAME, only_checkpoint, symbols_in
from mlsm_plugin.core.hidden_states.encoder import HiddenStateSource, check_layer
from mlsm_plugin.core.hidden_states.sources import register_fairseq
from mlsm_plugin.core.machine.devices import Device, default_device, half_products, placed
from mlsm_plugin.core.masking.word_boundaries import added_symbols
from mlsm_plugin.fairseq_plugin.compat import model_parts
from mlsm_plugin.fairseq_plugin.compat.checkpoint_contents import CheckpointState
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import (
    config_in,
    load_model,
    model_fingerprint,
    read_state,
    weights_in,
)
from mlsm_plugin.fairseq_plugin.compat.model_parts import EMBEDDINGS, layer_numbers
from mlsm_plugin.fairseq_plugin.data.token_blocks import differ_in_tokenizer, load_dictionary

KIND = "auxiliary checkpoint"


@register_fairseq
class FairseqEncoder(HiddenStateSource):
    """The layers of a RoBERTa-like checkpoint (``roberta``, ``mlsm_roberta``, ...) up to ``layer``.

    ``name`` is a fairseq checkpoint, or a folder with one. ``data_bin`` has the ``dict.txt`` that it was trained with;
    ``dictionary`` is made from it and has ``<mask>``. Other arguments are those of :class:`HiddenStateSource`.

    Raises:
        FileNotFoundError: the checkpoint or the dictionary does not exist.
        ValueError: the checkpoint is not RoBERTa-like or has another vocabulary, or the layer is out of range.
    """

    def __init__(
        self, name: PathLike, data_bin: PathLike, *, layer: int, device: Device = None, fp16: bool | None = False
    ) -> None:
        self.dictionary = load_dictionary(data_bin)
        model, self.cfg = load_roberta(name, data_bin, self.dictionary)
        self.layer = layer
        encoder = model_parts.sentence_encoder(model)
        self.num_layers = model_parts.num_layers(encoder)
        check_layer(layer, self.num_layers, name)
        self.max_tokens = int(model.max_positions())
        self.device = default_device(device)
        self._half = fp16
        self._encoder = model_parts.keep_first_layers(encoder, layer).eval()
        self.to(self.device)
        self.dim = int(model_parts.token_embeddings(self._encoder).embedding_dim)

    def to(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        placed(self._encoder, self.device, half=self._half)

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor) -> Tensor:
        with half_products(self.device, half=self._half):
            return model_parts.last_hidden_states(self._encoder, tokens.to(self.device)).float()

    @torch.no_grad()
    def hidden_states_of(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """See :meth:`HiddenStateSource.hidden_states_of`; the last layer of ``mlsm_modern`` only computes these."""
        with half_products(self.device, half=self._half):
            hidden = model_parts.last_hidden_states(self._encoder, tokens.to(self.device), chosen.to(self.device))
            return hidden.float()

    @classmethod
    def files_of(cls, name: PathLike) -> list[Path]:
        """The checkpoint; FileNotFoundError if there is none, or a folder has several."""
        return [only_checkpoint(name, KIND)]

    @classmethod
    def layers_of(cls, name: PathLike) -> int:
        """Number of encoder layers of the checkpoint; ValueError if it is not RoBERTa-like."""
        return 1 + max(layer_numbers(weights_in(_read(name))), default=-1)

    @classmethod
    def usual_tokens_of(cls, name: PathLike) -> int:
        """The model's positions, or the longest sample that it was trained on if that is shorter."""
        cfg = config_in(_read(name))
        positions = int(cfg.model.max_positions)
        return min(positions, int(getattr(cfg.task, "tokens_per_sample", None) or positions))

    @classmethod
    def tokenizer_of(cls, name: PathLike) -> str:
        """The folder of the checkpoint, which holds its tokenizer."""
        return str(only_checkpoint(name, KIND).parent)

    @classmethod
    def width_of(cls, name: PathLike) -> int | None:
        """Width of the hidden states, the same as of the embeddings."""
        return int(weights_in(_read(name))[EMBEDDINGS].shape[1])

    @classmethod
    def fingerprint_of(cls, name: PathLike) -> str:
        """SHA-256 of the weights and of the options of the architecture."""
        return model_fingerprint(cls.files_of(name)[0])


def _read(name: PathLike, overrides: dict[str, str] | None = None) -> CheckpointState:
    """The state in the checkpoint ``name``; ValueError if it is not RoBERTa-like."""
    checkpoint = only_checkpoint(name, KIND)
    state = read_state(checkpoint, overrides, kind=KIND)
    if EMBEDDINGS not in weights_in(state):
        raise ValueError(f"{checkpoint} does not hold a RoBERTa-like encoder ({EMBEDDINGS} is missing)")
    return state


def load_roberta(
    name: PathLike, data_folder: PathLike, dictionary: Dictionary
) -> tuple[BaseFairseqModel, FairseqConfig]:
    """The model in a checkpoint, and its whole configuration; arguments and errors as for :class:`FairseqEncoder`."""
    checkpoint = only_checkpoint(name, KIND)
    data_bin = Path(data_folder)
    overrides = {"data": str(data_bin)}
    state = _read(checkpoint, overrides)
    num_symbols = len(dictionary) + len(added_symbols(config_in(state).task))
    embeddings = weights_in(state)[EMBEDDINGS]
    if len(embeddings) != num_symbols:
        raise ValueError(
            f"{checkpoint} was trained with {len(embeddings)} symbols, {data_bin}/dict.txt has {num_symbols} "
            "(with <mask>); binarize the text with the tokenizer of the auxiliary model"
        )
    model_dictionary = checkpoint.parent / DICTIONARY_NAME
    data_dictionary = data_bin / DICTIONARY_NAME
    if model_dictionary.exists() and symbols_in(model_dictionary) != symbols_in(data_dictionary):
        raise ValueError(
            f"{model_dictionary} of the auxiliary model and {data_dictionary} differ; "
            "binarize the text with the tokenizer of the auxiliary model"
        )
    model, _, _ = load_model(checkpoint, overrides, state=state)
    if differ_in_tokenizer(checkpoint.parent, data_bin):
        raise ValueError(
            f"{data_bin} was binarized with another tokenizer than the one beside {checkpoint}: the same text has "
            "other ids; binarize it with the tokenizer of the auxiliary model"
        )
    return model, config_in(state)
