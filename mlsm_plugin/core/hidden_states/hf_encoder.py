"""Hidden states of one layer of a Hugging Face encoder, for Hugging Face's own ids and for fairseq's."""

import copy
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.finite_weights import check_finite_weights
from mlsm_plugin.core.files.hf_files import (
    HEAD_OF_DEBERTA,
    UNTRAINED_HEAD,
    check_read,
    first_line,
    hf_folder,
    import_transformers,
    other_name_of_bias,
    weight_files,
)
from mlsm_plugin.core.files.sentence_modules import pooling_of
from mlsm_plugin.core.hidden_states.encoder import HiddenStateEncoder, HiddenStateSource, check_layer
from mlsm_plugin.core.machine.devices import Device, default_device, half_products, placed
from mlsm_plugin.core.text.hf_tokenizer import FAIRSEQ_PAD, HuggingFaceTokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

POSITIONS_AFTER_PADDING = ("camembert", "mpnet", "roberta", "xlm-roberta")  # numbered from the padding id + 1
# encoders that output the last layer, ModernBERT after a norm
_OTHERS = ("bert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert")  # numbered from 0, or relative
SUPPORTED = tuple(sorted((*_OTHERS, *POSITIONS_AFTER_PADDING)))
FEWEST_LAYERS = {"deberta": 1, "deberta-v2": 1, "modernbert": 1}  # transformers cannot build these without layers
LARGEST_PADDING = 1024  # extra rows that an embedding may have after the vocabulary; a popular Italian BERT has 1,000
OF_LAYER = re.compile(r"\blayers?\.\d+\.")  # names of weights
FLOAT32_ONLY = ("deberta",)  # the library's attention overflows in half precision
ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")  # names in configurations
PATCHING = threading.Lock()  # since 4.56, transformers patches the layers while it collects hidden states


class HuggingFaceEncoder(HiddenStateEncoder):
    """A model of ``transformers`` of one of the types in ``SUPPORTED``; needs no fairseq.

    Hidden state ``layer`` is Hugging Face's ``hidden_states[layer]`` with ``output_hidden_states=True``. ValueError if
    the model does not exist, its type is not in ``SUPPORTED``, weights are missing, the tokenizer does not fit the
    embeddings, or the layer is out of range.

    ``name`` is a folder or hub name, with or without ``hf:``. If ``tokenizer`` is None, it is loaded from the model's
    folder. ``pad`` is its padding id, and ``folder`` the folder of the model. Other arguments and attributes are those
    of :class:`HiddenStateSource`.
    """

    def __init__(
        self,
        name: PathLike,
        *,
        layer: int,
        tokenizer: HuggingFaceTokenizer | None = None,
        device: Device = None,
        fp16: bool | None = False,
    ) -> None:
        folder, config, self.tokenizer = model_and_tokenizer(name, tokenizer, weights=True)
        self.folder = folder
        self.layer = layer
        self.num_layers = int(config.num_hidden_layers)
        check_layer(layer, self.num_layers, folder)
        self.pad = self.tokenizer.pad_id
        self.max_tokens = positions_of(config)
        self.dim = int(config.hidden_size)
        self.device = default_device(device)
        fewer_layers = layer < self.num_layers
        first_layers = _first_layers(config, layer)
        self._model = load_library_model(folder, first_layers, fewer_layers=fewer_layers).float().eval()
        if config.model_type == "modernbert" and layer < self.num_layers:
            self._model.final_norm = nn.Identity()  # follows the last layer only
        self._half = half_of(config, fp16)
        self.to(self.device)

    def to(self, device: str | torch.device) -> None:
        """Move the model to ``device``."""
        self.device = torch.device(device)
        placed(self._model, self.device, half=self._half)

    @cached_property
    def pooling(self) -> str:  # type: ignore[override]
        """That of a sentence-transformers folder, else ``mean``; ValueError if it is another than these two."""
        return pooling_of(self.folder)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Hidden states ``(B, T, dim)`` float32 of Hugging Face's ids ``(B, T)``, right-padded with ``pad``."""
        tokens = tokens.to(self.device)
        return self._hidden_states(tokens, tokens.ne(self.pad))

    @torch.no_grad()
    def _hidden_states(self, ids: Tensor, attended: Tensor) -> Tensor:
        mask = attended.long()
        with half_products(self.device, half=self._half):
            if self._model.config.num_hidden_layers > self.layer:
                with PATCHING:
                    hidden: Tensor = self._model(
                        input_ids=ids, attention_mask=mask, output_hidden_states=True
                    ).hidden_states[self.layer]
            else:
                hidden = self._model(input_ids=ids, attention_mask=mask)[0]
        return hidden.float()


def supported_config(folder: Path, types: Sequence[str] = SUPPORTED) -> "PretrainedConfig":
    """The configuration of a model; ValueError if its type is not in ``types``, or transformers misreads it."""
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers has no common error for missing files, damaged files and unknown types
        raise ValueError(f"{folder} does not hold a Hugging Face model: {first_line(error)}") from None
    if config.model_type not in types:
        raise ValueError(f"{folder} is a model of type {config.model_type}; supported types: {', '.join(types)}")
    check_read(config, folder)
    check_encoder(config, folder)
    return config


def check_encoder(config: "PretrainedConfig", name: object) -> None:
    """Raise ValueError if the model ``name`` is a decoder, whose tokens only see earlier tokens."""
    if getattr(config, "is_decoder", False):
        raise ValueError(
            f"{name} is a decoder (is_decoder is true in its configuration), and this package needs an encoder; if the "
            "model was trained as an encoder, set is_decoder to false"
        )


def half_of(config: "PretrainedConfig", half: bool | None) -> bool | None:
    """``half`` as for :func:`half_products`; False, with a warning, for a model that overflows in half precision."""
    if config.model_type not in FLOAT32_ONLY:
        return half
    if half:
        logger.warning("a model of type %s overflows in half precision; it is computed in float32", config.model_type)
    return False


def _first_layers(config: "PretrainedConfig", number: int) -> "PretrainedConfig":
    """Change ``config`` to keep the first ``number`` layers, or the fewest that transformers can build."""
    number = max(number, FEWEST_LAYERS.get(config.model_type, 0))
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:number]
    config.num_hidden_layers = number
    return config


def positions_of(config: "PretrainedConfig") -> int:
    """Longest sample in tokens that the model can take, or was made for if its positions are relative."""
    positions = int(config.max_position_embeddings)
    if config.model_type not in POSITIONS_AFTER_PADDING:
        return positions
    # mpnet uses 1, whatever the configuration says
    padding = 1 if config.model_type == "mpnet" else int(config.pad_token_id)
    return positions - padding - 1


def model_and_tokenizer(
    name: PathLike, tokenizer: HuggingFaceTokenizer | PathLike | None = None, *, weights: bool = False
) -> tuple[Path, "PretrainedConfig", HuggingFaceTokenizer]:
    """The folder of a model, its configuration, and its tokenizer (None: load it from the model's folder).

    ValueError if the model or the tokenizer does not exist or is not supported, or they do not fit together.
    """
    folder = hf_folder(name, weights=weights)
    config = supported_config(folder)
    loaded_tokenizer = (
        tokenizer if isinstance(tokenizer, HuggingFaceTokenizer) else HuggingFaceTokenizer(tokenizer or folder)
    )
    check_vocabulary(loaded_tokenizer, int(config.vocab_size), folder)
    return folder, config, loaded_tokenizer


class KnowsIds(Protocol):
    """A tokenizer, or an object made from one."""

    largest_id: int


def check_vocabulary(tokenizer: KnowsIds, rows: int, name: object) -> None:
    """Raise ValueError unless the ``rows`` embeddings of the model ``name`` fit the tokenizer.

    The ids that are masked and drawn come from the tokenizer.
    """
    needed = tokenizer.largest_id + 1
    if not needed <= rows < needed + LARGEST_PADDING:
        raise ValueError(
            f"{name}: the tokenizer's ids need {needed} embeddings, the model has {rows}; use its own tokenizer, or "
            "resize the embeddings to it"
        )


def check_positions(longest: int, positions: int, name: str) -> None:
    """Raise ValueError if the sequence ``name`` of ``longest`` tokens is too long for the model's positions."""
    if longest > positions:
        raise ValueError(
            f"{name} has {longest} tokens, but the model takes at most {positions}; cut the sequences, for example "
            f"with `mlsm binarize --format sequences --max-length {positions}`"
        )


def load_library_model(
    folder: Path,
    config: "PretrainedConfig | None" = None,
    kind: str = "AutoModel",
    *,
    state: dict[str, Tensor] | None = None,
    new_head: str | None = None,
    fewer_layers: bool = False,
    other_head: bool = False,
) -> Any:
    """Load a model of Hugging Face's class ``kind``.

    Weights that the model does not have, such as those of later layers, are ignored. Code from the hub never runs.

    Args:
        folder: folder of the model.
        config: configuration of the model to make; None: read it from the folder.
        kind: name of the class.
        state: weights by name, which require a ``config``; None: read them from the folder.
        new_head: end of the warning about a new head if the folder has none; empty: no warning; None: the folder must
            have a head.
        fewer_layers: whether the ``config`` asks for fewer layers than the folder has; otherwise weights of further
            layers cause a warning.
        other_head: whether weights of a head that has another shape in the folder are initialized at random.

    Raises:
        ValueError: weights cannot be read, have other shapes, are not finite or are missing, or the head is needed but
            was not trained.
    """
    if "MaskedLM" in kind and new_head is None and (folder / UNTRAINED_HEAD).is_file():
        raise ValueError(
            f"{folder} is a checkpoint of a training that does not train the masked-LM head; use a model whose head is "
            "trained"
        )
    model, info = _opened(folder, config, kind, state, ignore_shapes=other_head)
    prefix = f"{model.base_model_prefix}."
    other_shapes = [item[0] for item in info["mismatched_keys"] if item[0].startswith(prefix)]
    if other_shapes:
        raise ValueError(f"the weights of {folder} cannot be read: {other_shapes[0]} has another shape in config.json")
    missing = _missing_weights(model, info, folder)
    of_encoder = [name for name in missing if name.startswith(prefix)]
    if new_head and len(of_encoder) < len(missing):
        logger.warning("%s has no masked-LM head; a new one is initialized at random, %s", folder, new_head)
    if new_head is not None:
        missing = of_encoder
    if missing and not of_encoder and "MaskedLM" in kind:
        raise ValueError(f"{folder} was saved without a masked-LM head (it lacks weights such as {missing[0]})")
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of its model, such as {missing[0]}")
    if not fewer_layers:
        _warn_of_further_layers(info, folder)
    check_finite_weights(model.named_parameters(), folder)
    return model


def _opened(
    folder: Path, config: "PretrainedConfig | None", kind: str, state: dict[str, Tensor] | None, *, ignore_shapes: bool
) -> tuple[Any, dict[str, Any]]:
    """A model, and its missing, unexpected and mismatched weights; arguments are those of :func:`load_library_model`.

    With ``ignore_shapes``, weights of another shape are initialized at random.
    """
    transformers = import_transformers()
    try:
        model_class = getattr(transformers, kind)
        if state is None:
            model, info = model_class.from_pretrained(
                folder,
                trust_remote_code=False,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=ignore_shapes,
            )
        else:  # the Auto classes need a folder
            model, info = type(model_class.from_config(config)).from_pretrained(
                None, state_dict=state, config=config, output_loading_info=True
            )
    except Exception as error:  # transformers has no common error for damaged files and weights of other shapes
        raise ValueError(f"the weights of {folder} cannot be read: {first_line(error)}") from None
    return model, info


def _missing_weights(model: Any, info: dict[str, Any], folder: Path) -> list[str]:
    """The names of weights that the folder lacks; ValueError if it has the head under DeBERTa's older name."""
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name and "position_ids" not in name)
    missing = _without_second_biases(model, missing)
    if missing and any(name.startswith(HEAD_OF_DEBERTA) for name in info["unexpected_keys"]):
        raise ValueError(
            f'{folder} has its masked-LM head in {HEAD_OF_DEBERTA[:-1]}, like the published DeBERTa; set "legacy": '
            "false in its config.json"
        )
    return missing


def _warn_of_further_layers(info: dict[str, Any], folder: Path) -> None:
    """Log a warning if the folder has weights of layers that its config.json does not have."""
    further = sorted(name for name in info["unexpected_keys"] if OF_LAYER.search(name))
    if further:
        logger.warning(
            "%s has %d weights of layers that its config.json does not have, such as %s; they are left out",
            folder,
            len(further),
            further[0],
        )


def _without_second_biases(model: Any, missing: list[str]) -> list[str]:
    """Remove from ``missing`` the biases of a head that the folder has under another name; copy their values.

    transformers 4 writes one of the two, and version 5 has two parameters in a model that is not tied.
    """
    weights = dict(model.named_parameters())
    still_missing = []
    for name in missing:
        second_name = other_name_of_bias(name)
        if second_name in weights and second_name not in missing:
            weights[name].data.copy_(weights[second_name].data)
        else:
            still_missing.append(name)
    return still_missing


def load_masked_lm(name: PathLike, *, new_head: str | None = None, attention_dropout: float | None = None) -> Any:
    """The masked LM in a folder or of a hub name, always in float32.

    ``new_head`` is as for :func:`load_library_model`. ``attention_dropout`` is as for :func:`built_with_dropout`; None:
    that of the folder. ValueError if the model does not exist, cannot be read, or has no masked-LM head and
    ``new_head`` is None.
    """
    folder = hf_folder(name, weights=True)

    def load(config: "PretrainedConfig | None") -> Any:
        return load_library_model(folder, config, kind="AutoModelForMaskedLM", new_head=new_head).float()

    if attention_dropout is None:
        model = load(None)
    else:
        model = built_with_dropout(supported_config(folder), load, attention_dropout)
    check_read(model.config, folder)
    check_encoder(model.config, folder)
    return model


def built_with_dropout(
    config: "PretrainedConfig", build: Callable[["PretrainedConfig"], Any], attention_dropout: float
) -> Any:
    """The model that ``build`` makes of a configuration, but with this dropout of attention weights in training.

    The configuration of the model, which is saved with it, keeps the dropout of ``config``.
    """
    changed = copy.deepcopy(config)
    names = [name for name in ATTENTION_DROPOUTS if hasattr(config, name)]
    for name in names:
        setattr(changed, name, attention_dropout)
    model = build(changed)
    for name in names:
        setattr(model.config, name, getattr(config, name))
    return model


class HuggingFaceSource(HuggingFaceEncoder, HiddenStateSource):
    """A :class:`HuggingFaceEncoder` for fairseq's ids of its own vocabulary.

    ``name`` is ``hf:`` followed by a folder or hub name, and ``data_bin`` a dataset that ``mlsm binarize --tokenizer``
    made with the model's tokenizer. ValueError if it was not made with it, and as for :class:`HuggingFaceEncoder`.
    """

    def __init__(
        self, name: PathLike, data_bin: PathLike, *, layer: int, device: Device = None, fp16: bool | None = False
    ) -> None:
        folder = hf_folder(name, weights=True)
        supported_config(folder)
        tokenizer = HuggingFaceTokenizer(folder)
        self._set_dataset(Path(data_bin), tokenizer)
        super().__init__(folder, layer=layer, tokenizer=tokenizer, device=device, fp16=fp16)

    def _set_dataset(self, data_bin: Path, tokenizer: HuggingFaceTokenizer) -> None:
        """Prepare to read the ids of a dataset; ValueError if they are not those of the tokenizer."""
        tokenizer.check_dictionary(data_bin)
        self._ids = torch.from_numpy(tokenizer.hf_ids)

    def to(self, device: str | torch.device) -> None:
        super().to(device)
        self._ids = self._ids.to(self.device)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.device)
        return self._hidden_states(self._ids[tokens], tokens.ne(FAIRSEQ_PAD))

    @classmethod
    def files_of(cls, name: PathLike) -> list[Path]:
        """The configuration and the weights."""
        folder = hf_folder(name, weights=True)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} does not hold a Hugging Face model: config.json is missing")
        return [folder / "config.json", *weight_files(folder)]

    @classmethod
    def layers_of(cls, name: PathLike) -> int:
        return int(supported_config(hf_folder(name)).num_hidden_layers)

    @classmethod
    def usual_tokens_of(cls, name: PathLike) -> int:
        """The model's positions."""
        return positions_of(supported_config(hf_folder(name)))

    @classmethod
    def width_of(cls, name: PathLike) -> int | None:
        return int(supported_config(hf_folder(name)).hidden_size)

    @classmethod
    def tokenizer_of(cls, name: PathLike) -> str:
        """The model itself, since its folder has the tokenizer."""
        return os.fspath(name)
