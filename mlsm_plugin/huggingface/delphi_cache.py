"""Write stored codes and their text as the activation cache that Delphi (EleutherAI) reads to name latents.

The folder of a layer has ``config.json`` and, for each range of latents, ``{first}_{last}.safetensors`` with
``locations`` (row of the tokens, place in the row, latent minus ``first``), ``activations``, and ``tokens``.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mlsm_plugin.core.files.atomic_files import PathLike, atomic_directory, write_json
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.huggingface.coded_text import open_coded_text
from mlsm_plugin.huggingface.token_sequences import TokenSequences

CONTEXT = 256  # tokens of a row, as in Delphi
FILES = 5  # at least, as in Delphi
NONZEROS_OF_FILE = 20_000_000  # approximate; limits the memory
POSITIONS_AT_ONCE = 1 << 16
FILE_OF_LATENTS = re.compile(r"\d+_\d+\.safetensors")


@dataclass(frozen=True)
class DelphiCache:
    """A written cache: the folder of the layer, and its numbers of tokens and non-zeros."""

    folder: Path
    tokens: int
    nonzeros: int


def write_delphi_cache(
    codes: PathLike, sequences: PathLike, model: PathLike, output: PathLike, *, overwrite: bool = False
) -> DelphiCache:
    """Write the codes of token sequences as a Delphi cache to the folder ``layer.L`` in ``output``.

    The sequences are concatenated and cut into rows of 256 tokens; the rest at the end is left out.

    Args:
        codes, sequences, model: as for :func:`open_coded_text`; Delphi opens the tokenizer of the model.
        output: folder for the layer.
        overwrite: replace an existing cache.

    Raises:
        ValueError: the codes belong to other sequences or another model, the text is too short, or a cache exists.
    """
    coded_text = open_coded_text(codes, sequences, model)
    store = coded_text.codes
    text = coded_text.text
    rows = text.num_tokens // CONTEXT
    if not rows:
        raise ValueError(f"the text has {text.num_tokens} tokens, and a row of Delphi's cache has {CONTEXT}")
    folder = Path(output) / f"layer.{store.meta.get('layer', 'unknown')}"
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"{folder} exists already; name another output, or pass --overwrite to replace it")
    tokens = np.concatenate(list(_ids(text)))[: rows * CONTEXT].reshape(rows, CONTEXT).astype(np.int32)
    config = _config(coded_text.model, Path(sequences), tokens.size)
    nonzeros = 0
    with atomic_directory(folder) as temporary:
        for first, last in _ranges(store, tokens.size):
            locations, activations = _entries(store, tokens.size, first, last)
            nonzeros += len(activations)
            contents = {"locations": locations, "activations": activations, "tokens": tokens}
            save_file(contents, temporary / f"{first}_{last}.safetensors")
        write_json(temporary / "config.json", config)
        _remove_latents(folder)
    return DelphiCache(folder, tokens.size, nonzeros)


def _remove_latents(folder: Path) -> None:
    """Remove the files of an earlier cache: files of other ranges would remain, and Delphi reads all files."""
    for path in folder.glob("*.safetensors"):
        if FILE_OF_LATENTS.fullmatch(path.name):
            path.unlink()


def _ids(text: TokenSequences) -> Iterator[np.ndarray]:
    for index in range(len(text)):
        yield text[index]


def _config(name: str, sequences: Path, tokens: int) -> dict[str, str | int]:
    """The settings that Delphi records with a cache; it reads back ``ctx_len`` and ``model_name``."""
    path = Path(name)
    return {
        "model_name": str(path.resolve()) if path.is_dir() else name,
        "ctx_len": CONTEXT,
        "cache_ctx_len": CONTEXT,
        "n_tokens": tokens,
        "dataset_repo": str(sequences),
        "dataset_split": "",
        "dataset_name": "",
        "dataset_column": "",
    }


def _ranges(store: CodeStore, tokens: int) -> list[tuple[int, int]]:
    """First and last latent of each file."""
    files = max(FILES, math.ceil(tokens * float(store.meta["mean_nonzeros"]) / NONZEROS_OF_FILE))
    bounds = np.unique(np.linspace(0, store.num_atoms, files + 1).astype(int)).tolist()
    return [(first, following - 1) for first, following in pairwise(bounds)]


def _entries(store: CodeStore, tokens: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Locations ``(N, 3)`` and activations ``(N,)`` float16 of latents ``first`` to ``last``, sorted by position."""
    locations_of_range: list[np.ndarray] = []
    weights_of_range: list[np.ndarray] = []
    with Progress(total=tokens, desc=f"latents {first} to {last}", unit="token", unit_scale=True) as progress:
        for start in range(0, tokens, POSITIONS_AT_ONCE):
            positions = np.arange(start, min(start + POSITIONS_AT_ONCE, tokens))
            atoms, weights = store.lookup(positions)
            used = (atoms >= first) & (atoms <= last) & (weights > 0)
            places = positions[np.nonzero(used)[0]]
            locations_of_range.append(np.stack([places // CONTEXT, places % CONTEXT, atoms[used] - first], axis=1))
            weights_of_range.append(weights[used])
            progress.update(len(positions))
    locations = np.concatenate(locations_of_range)
    kind = np.uint16 if locations.size == 0 or locations.max() < 1 << 16 else np.uint32
    return locations.astype(kind), np.concatenate(weights_of_range)
