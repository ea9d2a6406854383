"""The registry of sources of hidden states, by the prefix of a name, such as ``hf:`` for Hugging Face."""

import os
import re
from collections.abc import Callable

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.hf_files import HF_PREFIX
from mlsm_plugin.core.hidden_states.aligned_encoder import AlignedEncoder, alignment_fingerprint
from mlsm_plugin.core.hidden_states.encoder import HiddenStateSource
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.core.machine.devices import Device

Source = type[HiddenStateSource]

PREFIX = r"[a-z][a-z0-9_+-]+:"  # one letter and a colon would be a drive
# a name without a prefix ("") is a fairseq checkpoint; its class registers itself if fairseq works
_SOURCES: dict[str, Source] = {HF_PREFIX: HuggingFaceSource}
LONGEST_DEFAULT_BLOCK = 512  # longest block in tokens, unless an option asks for longer ones


def register_source(prefix: str) -> Callable[[Source], Source]:
    """A class decorator that registers a source for names that begin with ``prefix``, such as ``mine:``.

    ValueError if the prefix is not at least two letters and a colon, or belongs to another class, or the class is not a
    :class:`HiddenStateSource`.
    """
    if not re.fullmatch(PREFIX, prefix):
        raise ValueError(
            f"the prefix of a source is two or more lower-case letters and a colon, such as 'mine:', got {prefix!r}"
        )

    def register(source: Source) -> Source:
        if not issubclass(source, HiddenStateSource):
            raise ValueError(f"{source.__qualname__} is not a subclass of HiddenStateSource, as a source must be")
        known = _SOURCES.setdefault(prefix, source)
        if known is not source:
            raise ValueError(f"the prefix {prefix} belongs to {known.__qualname__}; choose another one")
        return source

    return register


def register_fairseq(source: Source) -> Source:
    """A class decorator that registers the source for names without a prefix."""
    return _SOURCES.setdefault("", source)


def source_of(name: PathLike) -> Source:
    """The class that opens the model ``name``; a name without a prefix is a fairseq checkpoint.

    ValueError if the prefix is not registered, or the model is a fairseq checkpoint and fairseq is missing.
    """
    prefix = re.match(PREFIX, os.fspath(name))
    if prefix is None or (prefix.group() not in _SOURCES and os.path.exists(name)):
        if "" not in _SOURCES:
            raise ValueError(
                f"{os.fspath(name)} would be a fairseq checkpoint, but fairseq does not work here (`mlsm doctor` says "
                "why); a Hugging Face model is hf:PATH"
            )
        return _SOURCES[""]
    if prefix.group() not in _SOURCES:
        known = ", ".join(sorted(filter(None, _SOURCES)))
        raise ValueError(
            f"{name}: the prefix {prefix.group()} is not known (known: {known}); if a plugin registers it, pass the "
            "plugin's folder with --user-dir"
        )
    return _SOURCES[prefix.group()]


def open_encoder(
    name: PathLike, data_bin: PathLike, *, layer: int, device: Device = None, fp16: bool | None = False
) -> HiddenStateSource:
    """Open the encoder ``name``; arguments are those of :class:`HiddenStateSource`, errors those of its source.

    A Hugging Face model reads a dataset of another vocabulary by an :class:`AlignedEncoder`.
    """
    source = source_of(name) if alignment_of(name, data_bin) is None else AlignedEncoder
    return source(name, data_bin, layer=layer, device=device, fp16=fp16)


def alignment_of(name: PathLike, data_bin: PathLike) -> str | None:
    """SHA-256 of how the model ``name`` reads a dataset of another vocabulary; None if it reads the ids themselves.

    It decides the hidden states, besides the model and the ids. ValueError if there is no tokenizer to read the ids.
    """
    return alignment_fingerprint(name, data_bin) if source_of(name) is HuggingFaceSource else None


def default_tokens_per_sample(name: PathLike) -> int:
    """Default length of a block in tokens: as long as the model can take, but at most 512."""
    return min(LONGEST_DEFAULT_BLOCK, source_of(name).usual_tokens_of(name))
