"""A new, small Hugging Face model, and a new tokenizer, for training from scratch."""

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm_plugin.core.files import hf_files
from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory
from mlsm_plugin.core.files.hf_files import GLOBAL, first_line, import_transformers
from mlsm_plugin.core.hidden_states.hf_encoder import built_with_dropout, supported_config
from mlsm_plugin.core.text.hf_tokenizer import load_fast_tokenizer, number_of_ids
from mlsm_plugin.core.text.text_files import read_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

SIZE = re.compile(r"(\d+)x(\d+)")
HEAD_WIDTH = 64
POSITIONS = 512
THETA = 10_000.0  # base of the rotary angles, as in mlsm_modern
LINES_AT_ONCE = 1000
# of a configuration, which :func:`new_model` sets
FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id")
logger = logging.getLogger(__name__)


def student_config(student: str) -> "PretrainedConfig":
    """The configuration of a new model: ``LAYERSxWIDTH``, such as ``4x256``, or the folder of a ``config.json``.

    A size gives a ModernBERT with the dimensions of fairseq's ``mlsm_modern``: heads of width 64, and a GeGLU with as
    many parameters as an MLP of 4 times the width. ValueError for other values, or if the type is not supported.
    """
    size = SIZE.fullmatch(student)
    if size is None:
        folder = config_folder(student)
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"--student is LAYERSxWIDTH, such as 4x256, or the folder of a config.json; {student!r} is neither"
            )
        return supported_config(folder)
    layers = int(size[1])
    width = int(size[2])
    if layers < 1 or width < 2 or width % 2 or (width > HEAD_WIDTH and width % HEAD_WIDTH):
        raise ValueError(
            f"--student {student}: at least 1 layer, and a width that is a multiple of {HEAD_WIDTH}, or "
            f"an even number below {HEAD_WIDTH}"
        )
    return _modernbert_config(layers, width)


def config_folder(student: str) -> Path:
    """The folder of a ``config.json``, which ``student`` names, or whose file it names."""
    return Path(student).parent if Path(student).name == "config.json" else Path(student)


def geglu_dim(dim: int) -> int:
    """The width of a GeGLU with about as many parameters as an MLP of width ``4 * dim``: 8/3 ``dim``, rounded to 32."""
    return max(32, 32 * round(8 * dim / 3 / 32))


def _modernbert_config(layers: int, width: int) -> "PretrainedConfig":
    """A ModernBERT with global attention in all layers."""
    transformers = import_transformers()
    try:
        config: PretrainedConfig = transformers.AutoConfig.for_model(
            "modernbert",
            hidden_size=width,
            intermediate_size=geglu_dim(width),
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // HEAD_WIDTH),
            max_position_embeddings=POSITIONS,
            global_attn_every_n_layers=1,
            global_rope_theta=THETA,
        )
    except ValueError as error:
        raise ValueError(f"the installed transformers does not know ModernBERT ({first_line(error)})") from None
    if hasattr(config, "layer_types"):  # from version 5 on
        config.layer_types = [GLOBAL] * layers
        config.rope_parameters = {
            name: {"rope_type": "default", "rope_theta": THETA} for name in config.rope_parameters
        }
    return config


def new_model(
    config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerFast", *, attention_dropout: float | None = None
) -> Any:
    """A masked LM for a tokenizer's ids, initialized at random from torch's random state.

    ``attention_dropout`` is the dropout of attention weights in training; None: that of ``config``.
    """
    transformers = import_transformers()
    config.vocab_size = number_of_ids(tokenizer)
    begin = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = begin
    config.cls_token_id = begin
    config.eos_token_id = end
    config.sep_token_id = end
    build = transformers.AutoModelForMaskedLM.from_config
    model = build(config) if attention_dropout is None else built_with_dropout(config, build, attention_dropout)
    return model.float()


def learn_tokenizer(texts: Sequence[PathLike], pattern: Path, output: PathLike, *, vocab_size: int) -> None:
    """Learn a tokenizer of the same kind and with the same special tokens as in the folder ``pattern``, and write it.

    It has at most ``vocab_size`` tokens; warns if the text has fewer. ValueError if ``vocab_size`` is too small for the
    characters of the text.
    """
    tokenizer = load_fast_tokenizer(pattern)

    def lines() -> Iterator[list[str]]:
        text = filter(None, read_text(texts))
        while batch := list(islice(text, LINES_AT_ONCE)):
            yield batch

    try:
        new_tokenizer = tokenizer.train_new_from_iterator(lines(), vocab_size=vocab_size)
    except (ValueError, OSError):
        raise  # caused by the text
    except Exception as error:  # the Unigram trainer has no specific error for too few pieces
        raise ValueError(
            f"no tokenizer of {vocab_size} pieces can be learned from the text ({first_line(error)}); pass another "
            "--vocab-size"
        ) from None
    size = number_of_ids(new_tokenizer)
    if size > vocab_size:
        raise ValueError(f"--vocab-size {vocab_size} is too small for the characters of the text; pass at least {size}")
    if size < vocab_size:
        logger.warning("the text has only %d different pieces; --vocab-size %d is more", size, vocab_size)
    with atomic_directory(output) as folder:
        hf_files.save_pretrained(folder, new_tokenizer)
