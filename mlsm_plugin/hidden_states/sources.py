"""The registry of sources of hidden states, by the prefix of a name, such as ``hf:`` for Hugging Face."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import torch

from mlsm_plugin.fairseq_seams import installation
from mlsm_plugin.files.hf_files import HF_PREFIX
from mlsm_plugin.hidden_states.encoder import HiddenStateEncoder
from mlsm_plugin.hidden_states.hf_encoder import HuggingFaceEncoder

Source = type[HiddenStateEncoder]

# one letter and a colon would be a drive
PREFIX = r"[a-z][a-z0-9_+-]+:"
# a name without a prefix ("") is a fairseq checkpoint, whose class is imported when it is needed
_SOURCES: dict[str, Source] = {HF_PREFIX: HuggingFaceEncoder}
# longest block in tokens, unless an option asks for longer ones
LONGEST_DEFAULT_BLOCK = 512


def register_source(prefix: str) -> Callable[[Source], Source]:
    """A class decorator that registers a source for names that begin with ``prefix``.

    Args:
        prefix: two or more letters and a colon, such as ``mine:``.

    Raises:
        ValueError: the prefix has another form, or belongs to another class.
    """
    if not re.fullmatch(PREFIX, prefix):
        raise ValueError(
            f"the prefix of a source is two or more lower-case letters and a colon, such as 'mine:', got {prefix!r}"
        )

    def register(source: Source) -> Source:
        known = _SOURCES.setdefault(prefix, source)
        if known is not source:
            raise ValueError(f"the prefix {prefix} belongs to {known.__qualname__}; choose another one")
        return source

    return register


def source_of(name: str | os.PathLike[str]) -> Source:
    """The class that opens the model of this name; a name without a prefix is a fairseq checkpoint.

    Raises:
        ValueError: the prefix of the name is not registered, or it is a fairseq checkpoint and fairseq is missing.
    """
    prefix = re.match(PREFIX, os.fspath(name))
    if prefix is None or (prefix.group() not in _SOURCES and os.path.exists(name)):
        return _of_fairseq(name)
    if prefix.group() not in _SOURCES:
        known = ", ".join(sorted(filter(None, _SOURCES)))
        raise ValueError(
            f"{name}: the prefix {prefix.group()} is not known (known: {known}); if a plugin registers it, pass the "
            "plugin's folder with --user-dir"
        )
    return _SOURCES[prefix.group()]


def _of_fairseq(name: str | os.PathLike[str]) -> Source:
    if "" in _SOURCES:
        return _SOURCES[""]
    try:
        from mlsm_plugin.hidden_states.fairseq_encoder import FairseqEncoder
    except ImportError as error:
        problem = installation.fairseq_problem() or str(error)
        raise ValueError(
            f"{os.fspath(name)} would be a fairseq checkpoint, but {problem}; a Hugging Face model is hf:PATH"
        ) from None
    return _SOURCES.setdefault("", FairseqEncoder)


def open_encoder(
    name: str | os.PathLike[str],
    data_bin: str | os.PathLike[str],
    *,
    layer: int,
    device: str | torch.device | None = None,
    fp16: bool = False,
) -> HiddenStateEncoder:
    """Open the encoder of this name; arguments are those of :class:`HiddenStateEncoder`, errors those of its source."""
    return source_of(name)(name, data_bin, layer=layer, device=device, fp16=fp16)


def default_tokens_per_sample(name: str | os.PathLike[str]) -> int:
    """Default length of a block in tokens: what the model can take, at most 512."""
    return min(LONGEST_DEFAULT_BLOCK, source_of(name).usual_tokens_of(name))
