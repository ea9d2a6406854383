"""Find the files of a Hugging Face model or tokenizer, which the command line calls ``hf:PATH``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HF_PREFIX = "hf:"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FILES = ["*.json", "*.txt", "*.model"]
LATENT_HEAD = "latent_head.safetensors"  # beside the weights of a model with a latent head
SHARDS = {"model.safetensors.index.json": "model-*.safetensors", "pytorch_model.bin.index.json": "pytorch_model-*.bin"}


def is_hf(name: str | os.PathLike[str]) -> bool:
    """Whether ``name`` is ``hf:``, followed by a folder or hub name."""
    return os.fspath(name).startswith(HF_PREFIX)


def import_transformers() -> Any:
    """Import ``transformers`` and turn off its progress bars and its advice.

    Raises:
        ValueError: ``transformers`` is not installed.
    """
    _leave_out_broken_torchaudio()
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"Hugging Face models need {error.name}: pip install 'mlsm_plugin[hf]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _leave_out_broken_torchaudio() -> None:
    """Hide a torchaudio that was built for another torch from transformers, which imports any torchaudio it finds.

    fairseq's source package requires torchaudio, of any version and build.
    """
    try:
        import torchaudio  # noqa: F401
    except ImportError:
        pass
    except OSError:
        sys.modules["torchaudio"] = None  # type: ignore[assignment]  # find_spec then reports it as missing


def hf_folder(name: str | os.PathLike[str], *, weights: bool = False) -> Path:
    """The local folder of ``hf:FOLDER`` or ``hf:HUB-NAME``; the files of a hub name are downloaded once.

    Without a network, a model counts that is in the library's cache.

    Args:
        name: with or without ``hf:``.
        weights: also get the weights of the model, and its latent head if it has one.

    Raises:
        ValueError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    name = os.fspath(name).removeprefix(HF_PREFIX)
    folder = Path(name)
    if name and folder.is_dir():
        return folder
    if not name or folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{name or HF_PREFIX} is not a folder of a Hugging Face model; pass hf:FOLDER or hf:HUB-NAME")
    import_transformers()
    try:
        return _snapshot(name, weights=weights)
    except Exception as error:  # network, permission and name errors of several libraries
        cached = _cached_with_weights(name) if weights else None
        if cached is not None:
            return cached
        raise ValueError(f"{name} is not a local folder, and the hub does not offer it: {first_line(error)}") from None


def _snapshot(name: str, *, weights: bool) -> Path:
    """The folder of a hub name; without weights, the library takes it from its cache if there is no network."""
    from huggingface_hub import list_repo_files, snapshot_download

    wanted = list(FILES)
    if weights:
        there = set(list_repo_files(name))
        chosen = next((file for file in WEIGHTS if file in there), WEIGHTS[0])
        wanted += [chosen, SHARDS.get(chosen, chosen), LATENT_HEAD]
    return Path(snapshot_download(name, allow_patterns=wanted))


def _cached_with_weights(name: str) -> Path | None:
    """The folder of a hub name in the library's cache; None if it is not there, or has no weights."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        weight_files(folder)
    except Exception:  # errors of several libraries
        return None
    return folder


@contextmanager
def written_by_library(folder: Path) -> Iterator[None]:
    """Turn what a library raises when it cannot write, errors of no common type, into OSError."""
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
    """The files that ``transformers`` reads the weights from.

    Raises:
        ValueError: the folder has no weights.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name, *sorted(folder.glob(SHARDS.get(name, "no shards")))]
    raise ValueError(f"{folder} has no weights ({' or '.join(WEIGHTS[::2])})")
