"""Write the folder of a trained model for both major versions of transformers, and check it by opening it again."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mlsm_plugin.core.files import hf_files
from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import import_transformers, portable_weights
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.core.text.masked_reading import masked_lines, reading_as_trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mlsm_plugin.huggingface.pretraining_model import PretrainingModel

logger = logging.getLogger(__name__)


def save_pretrained(folder: PathLike, *parts: "PreTrainedModel | PreTrainedTokenizerBase") -> None:
    """Write models and fast tokenizers with their ``save_pretrained``, for both major versions of ``transformers``.

    The tokenizers read text next to masks in the same way as in training. OSError if the folder cannot be written.
    """
    saved_parts = [part if isinstance(part, torch.nn.Module) else reading_as_trained(part) for part in parts]
    hf_files.save_pretrained(folder, *saved_parts)


def check_saved(folder: Path, model: "PretrainingModel", tokenizer: HuggingFaceTokenizer, lines: Iterable[str]) -> None:
    """Open a folder, and compare its weights with the trained model and its ids of ``lines`` with those in training.

    ValueError if weights or ids differ. Warns if ids next to masks differ, which can happen with unusual tokenizers.
    """
    transformers = import_transformers()
    _check_weights(folder, model)
    saved_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    symbols = list(saved_tokenizer.get_added_vocab())
    plain = [line for line in lines if not any(symbol in line for symbol in symbols)]
    for line in plain:
        if saved_tokenizer(line, add_special_tokens=False)["input_ids"] != tokenizer.ids_of(line):
            raise ValueError(f"the tokenizer in {folder} gives other ids for {line!r} than the one used in training")
    if saved_tokenizer.mask_token is not None:
        _warn_of_masks(saved_tokenizer, tokenizer, plain)


def _warn_of_masks(
    saved_tokenizer: "PreTrainedTokenizerBase", tokenizer: HuggingFaceTokenizer, lines: Iterable[str]
) -> None:
    """Warn if a line with masks in it has other ids than in training; the warning shows the first such line."""
    mask = saved_tokenizer.mask_token
    for variant in (variant for line in lines for variant in masked_lines(line, mask)):
        if saved_tokenizer(variant, add_special_tokens=False)["input_ids"] != tokenizer.ids_with_masks(variant, mask):
            text = "the tokenizer of the model reads %r with other ids beside the mask than it was trained on"
            logger.warning(text, variant)
            return


def _check_weights(folder: Path, model: Any) -> None:
    """Raise ValueError unless the stock class opens the folder with the weights of the trained model."""
    transformers = import_transformers()
    weights = portable_weights(model.state_dict())
    if model.has_trained_head:
        stock = transformers.AutoModelForMaskedLM
        prefix = ""
    else:
        stock = transformers.AutoModel
        prefix = f"{model.base_model_prefix}."
    for name, values in stock.from_pretrained(folder).state_dict().items():
        trained = weights.get(prefix + name)
        if trained is not None and not torch.equal(values, trained.cpu().to(values.dtype)):
            raise ValueError(f"{folder} holds another {name} than the trained model")
