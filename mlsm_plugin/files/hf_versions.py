"""Write models and tokenizers so that ``transformers`` 4.48 and later and 5 read the same from them.

Version 5 writes names that version 4 does not know. Version 4 then stops, or takes a default in silence, such as other
angles for the rotary positions of ModernBERT. Here the files get the names that both read, or those of both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlsm_plugin.files.atomic_files import read_json, write_json
from mlsm_plugin.files.hf_files import written_by_library

GLOBAL, LOCAL = "full_attention", "sliding_attention"  # the types of ModernBERT's layers
GLOBAL_EVERY = 3  # of the published ModernBERT
PLAIN_ANGLES = {"rope_type", "rope_theta"}
# Another name of lm_head.bias. Version 4 reads only this one up to 4.50, and loses the bias of RoBERTa without it.
TIED_BIAS = "lm_head.decoder.bias"


def save_pretrained(folder: str | os.PathLike[str], *parts: Any) -> None:
    """Write models and fast tokenizers of ``transformers`` for both of its lines, each with its ``save_pretrained``.

    Version 4 does not open what it cannot compute, such as a ModernBERT with scaled rotary positions.

    Args:
        folder: the folder.
        parts: the models and tokenizers.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    with written_by_library(folder):
        for part in parts:
            if hasattr(part, "state_dict"):
                weights = part.state_dict()
                if TIED_BIAS in weights:
                    weights[TIED_BIAS] = weights[TIED_BIAS].clone()  # the library leaves out a second name of a tensor
                part.save_pretrained(folder, state_dict=weights)
                _change(folder / "config.json", _add_keys_of_models)
            else:
                part.save_pretrained(folder)
                _change(folder / "tokenizer_config.json", _change_keys_of_tokenizers, list(part.model_input_names))


def _change(path: Path, change: Callable[..., None], *further: Any) -> None:
    config = read_json(path)
    change(config, *further)
    write_json(path, dict(sorted(config.items())))


def _add_keys_of_models(config: dict[str, Any]) -> None:
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    if config.get("model_type") == "modernbert":
        config |= _keys_of_version_4(config.get("layer_types"), config.get("rope_parameters"))


def _keys_of_version_4(types: Sequence[str] | None, angles: dict[str, Any] | None) -> dict[str, Any]:
    """What version 4 reads of a ModernBERT in the place of two keys of version 5; empty without them."""
    if types is None or angles is None:
        return {}
    plain = all(angles[kind].keys() == PLAIN_ANGLES and angles[kind]["rope_type"] == "default" for kind in {*types})
    thetas = {kind: (angles.get(kind) or {}).get("rope_theta") for kind in (GLOBAL, LOCAL)}
    # None is what version 4 cannot compute with; without the key, it would take its default
    return {
        "global_attn_every_n_layers": global_every(types),
        "global_rope_theta": thetas[GLOBAL] if plain else None,
        "local_rope_theta": thetas[LOCAL],
    }


def check_read(config: Any, folder: Path) -> None:
    """Check that version 4 of the library, where it is installed, has read what version 5 wrote.

    Args:
        config: the configuration, as the library has read it.
        folder: where it lies.

    Raises:
        ValueError: it has taken defaults for the layers or the angles of a ModernBERT.
    """
    if config.model_type != "modernbert" or not hasattr(config, "global_rope_theta"):  # version 5 has no such field
        return
    said = _keys_of_version_4(getattr(config, "layer_types", None), getattr(config, "rope_parameters", None))
    wrong = [name for name, value in said.items() if getattr(config, name) != value]
    if wrong:
        raise ValueError(
            f"{folder} was written by transformers 5, and the installed version reads other values of "
            f"{', '.join(wrong)} from it; use version 5"
        )


def global_every(layer_types: Sequence[str]) -> int | None:
    """N, where every N-th layer of a ModernBERT is global, beginning with the first; None if there is no such number.

    If several numbers say the same, it is 3, or else the smallest one.
    """
    for number in (GLOBAL_EVERY, *range(1, len(layer_types) + 1)):
        if list(layer_types) == [LOCAL if layer % number else GLOBAL for layer in range(len(layer_types))]:
            return number
    return None


def _change_keys_of_tokenizers(config: dict[str, Any], inputs: list[str]) -> None:
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # whose inputs are others in version 4
    config["model_input_names"] = inputs
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
