"""Find the files of a Hugging Face model or tokenizer (``hf:PATH`` on the command line)."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlsm_plugin.core.files.atomic_files import PathLike, read_json, write_json
from mlsm_plugin.core.files.json_checks import JsonObject

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

HF_PREFIX = "hf:"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FILES = ["*.json", "*.txt", "*.model"]
LATENT_HEAD = "latent_head.safetensors"  # beside the weights of a model with a latent head
UNTRAINED_HEAD = "untrained_head.json"  # in a Trainer's checkpoint whose masked-LM head is not trained
TRAINER_STATE = "trainer_state.json"  # in every checkpoint of a Trainer
SHARDS = {"model.safetensors.index.json": "model-*.safetensors", "pytorch_model.bin.index.json": "pytorch_model-*.bin"}


def is_hf(name: PathLike) -> bool:
    """Whether ``name`` is ``hf:``, followed by a folder or hub name."""
    return os.fspath(name).startswith(HF_PREFIX)


def is_library_folder(name: PathLike) -> bool:
    """Whether a folder holds a Hugging Face model, and not checkpoints of fairseq.

    A Trainer's checkpoint also has ``*.pt`` files, such as the state of its optimizer.
    """
    folder = Path(name)
    if not (folder / "config.json").is_file():
        return False
    return (folder / TRAINER_STATE).is_file() or not any(folder.glob("*.pt"))


def import_transformers() -> ModuleType:
    """Import ``transformers`` without its progress bars and advice; ValueError if it is not installed."""
    _leave_out_broken_torchaudio()
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"Hugging Face models need {error.name}: pip install 'mlsm_plugin[hf]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _leave_out_broken_torchaudio() -> None:
    """Hide a torchaudio that was built for another torch, since importing it would make transformers fail."""
    try:
        import torchaudio  # noqa: F401
    except ImportError:
        pass
    except OSError:
        sys.modules["torchaudio"] = None  # type: ignore[assignment]  # find_spec then reports it as missing


def hf_folder(name: PathLike, *, weights: bool = False) -> Path:
    """The local folder of ``hf:FOLDER`` or ``hf:HUB-NAME``; the files of a hub name are downloaded once.

    Without a network, the model is taken from Hugging Face's cache. ``weights`` also downloads the weights, and the
    latent head if there is one. ValueError if there is no such folder, and the hub has no such model or cannot be
    reached.
    """
    name = os.fspath(name).removeprefix(HF_PREFIX)
    folder = Path(name)
    if name and folder.is_dir():
        return folder
    if not name or folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{name or HF_PREFIX} is not a folder of a Hugging Face model; pass a folder or a hub name")
    import_transformers()
    try:
        return _snapshot(name, weights=weights)
    except Exception as error:  # network, permission and name errors of several libraries
        with suppress(Exception):
            cached = _snapshot(name, weights=False, local_files_only=True)
            if weights and weight_files(cached):
                return cached
        raise ValueError(f"{name} is not a local folder, and the hub does not offer it: {first_line(error)}") from None


def _snapshot(name: str, *, weights: bool, local_files_only: bool = False) -> Path:
    """The folder of a hub name; without ``weights``, it comes from the cache if there is no network."""
    from huggingface_hub import list_repo_files, snapshot_download

    patterns = list(FILES)
    if weights:
        available = set(list_repo_files(name))
        chosen = next((file for file in WEIGHTS if file in available), WEIGHTS[0])
        patterns += [chosen, SHARDS.get(chosen, chosen), LATENT_HEAD]
    return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=local_files_only))


@contextmanager
def written_by_library(folder: Path) -> Iterator[None]:
    """Turn any error of a library that cannot write into OSError; such errors have no common type."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{folder} cannot be written: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def weight_files(folder: Path) -> list[Path]:
    """The files that ``transformers`` reads the weights from; ValueError if the folder has none."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name, *sorted(folder.glob(SHARDS.get(name, "no shards")))]
    raise ValueError(f"{folder} has no weights ({' or '.join(WEIGHTS[::2])})")


# the types of ModernBERT's layers
GLOBAL = "full_attention"
LOCAL = "sliding_attention"
GLOBAL_EVERY = 3  # every third layer of the published ModernBERT is global
PLAIN_ANGLES = {"rope_type", "rope_theta"}
# The bias of a head's projection has two names. transformers 5 uses this name, and versions up to 4.50 read only this
# name for RoBERTa. Later 4.x versions use the other name.
DECODER_BIAS = ".decoder.bias"
# transformers reads this head only if the configuration of a DeBERTa is not "legacy"; version 4.51 fails on it
HEAD_OF_DEBERTA = "lm_predictions.lm_head."
LEGACY_HEAD = "cls.predictions."


def save_pretrained(folder: PathLike, *parts: Any) -> None:
    """Write models and fast tokenizers with ``save_pretrained`` such that ``transformers`` 4 and 5 can both read them.

    Version 4 fails on a model that it does not support, such as a ModernBERT with scaled rotary positions. OSError if
    the folder cannot be written.
    """
    folder = Path(folder)
    with written_by_library(folder):
        for part in parts:
            if hasattr(part, "state_dict"):
                weights = portable_weights(part.state_dict())
                part.save_pretrained(folder, state_dict=weights)
                legacy = any(name.startswith(LEGACY_HEAD) for name in weights)
                _change(folder / "config.json", partial(_add_keys_of_models, legacy=legacy))
            else:
                part.save_pretrained(folder)
                change_keys = partial(_change_keys_of_tokenizers, inputs=list(part.model_input_names))
                _change(folder / "tokenizer_config.json", change_keys)


def _change(path: Path, change: Callable[[JsonObject], None]) -> None:
    config = read_json(path)
    change(config)
    write_json(path, dict(sorted(config.items())))


def portable_weights(weights: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """The weights of a model under the names that both versions of ``transformers`` read."""
    portable = {}
    for name, values in weights.items():
        if name.startswith(HEAD_OF_DEBERTA):
            part = name.removeprefix(HEAD_OF_DEBERTA)
            name = LEGACY_HEAD + (part if part == "bias" else f"transform.{part}")
        portable[name] = values
    if any(name.startswith(HEAD_OF_DEBERTA) for name in weights):
        portable[f"{LEGACY_HEAD}decoder.bias"] = portable[f"{LEGACY_HEAD}bias"]
    for name in [name for name in portable if name.endswith(DECODER_BIAS)]:
        # transformers leaves out a second name of a tensor
        portable[other_name_of_bias(name)] = portable[name].clone()
    return portable


def other_name_of_bias(name: str) -> str:
    """The second name of the bias of a head's projection; other names are returned unchanged."""
    return name.removesuffix(DECODER_BIAS) + ".bias" if name.endswith(DECODER_BIAS) else name


def _add_keys_of_models(config: JsonObject, legacy: bool) -> None:
    if legacy and config.get("legacy") is False:
        config["legacy"] = True
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    if config.get("model_type") == "modernbert":
        config |= _keys_of_version_4(config.get("layer_types"), config.get("rope_parameters"))


def _keys_of_version_4(types: Sequence[str] | None, angles: JsonObject | None) -> JsonObject:
    """The keys of a ModernBERT that version 4 reads instead of two keys of version 5; empty if these are missing."""
    if types is None or angles is None:
        return {}
    plain = all(angles[kind].keys() == PLAIN_ANGLES and angles[kind]["rope_type"] == "default" for kind in {*types})
    thetas = {kind: (angles.get(kind) or {}).get("rope_theta") for kind in (GLOBAL, LOCAL)}
    # version 4 cannot compute with None, but would take its default if the key were missing
    return {
        "global_attn_every_n_layers": global_every(types),
        "global_rope_theta": thetas[GLOBAL] if plain else None,
        "local_rope_theta": thetas[LOCAL],
    }


def check_read(config: "PretrainedConfig", folder: Path) -> None:
    """Raise ValueError if transformers 4 fell back to default layers or angles for a ModernBERT of version 5."""
    if config.model_type != "modernbert" or not hasattr(config, "global_rope_theta"):  # version 5 has no such field
        return
    expected = _keys_of_version_4(getattr(config, "layer_types", None), getattr(config, "rope_parameters", None))
    wrong = [name for name, value in expected.items() if getattr(config, name) != value]
    if wrong:
        raise ValueError(
            f"{folder} was written by transformers 5, and the installed version reads other values of "
            f"{', '.join(wrong)} from it; use version 5"
        )


def global_every(layer_types: Sequence[str]) -> int | None:
    """N such that every N-th layer of a ModernBERT is global, beginning with the first; None if there is no such N.

    If several N fit, it is 3 if that fits, or else the smallest.
    """
    for number in (GLOBAL_EVERY, *range(1, len(layer_types) + 1)):
        if list(layer_types) == [LOCAL if layer % number else GLOBAL for layer in range(len(layer_types))]:
            return number
    return None


def _change_keys_of_tokenizers(config: JsonObject, inputs: list[str]) -> None:
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # it has other inputs in version 4
    config["model_input_names"] = inputs
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
