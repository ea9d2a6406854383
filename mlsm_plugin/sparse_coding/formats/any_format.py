"""Read a dictionary of any known format, which its files tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mlsm_plugin.sparse_coding.dictionary import Dictionary
from mlsm_plugin.sparse_coding.formats import dictionary_learning, saelens, sparsify
from mlsm_plugin.sparse_coding.formats.npy_matrix import read_npy_matrix
from mlsm_plugin.sparse_coding.sae_coder import SaeCoder

# file of weights -> file of settings, reader
FOLDERS: dict[str, tuple[str, Callable[[Path], SaeCoder]]] = {
    saelens.WEIGHTS_FILE: (saelens.CONFIG_FILE, saelens.read_saelens),
    sparsify.WEIGHTS_FILE: (sparsify.CONFIG_FILE, sparsify.read_sparsify),
    dictionary_learning.WEIGHTS_FILE: (
        dictionary_learning.CONFIG_FILE,
        dictionary_learning.read_dictionary_learning,
    ),
}
KNOWN = (
    "SAELens (cfg.json, sae_weights.safetensors), sparsify (cfg.json, sae.safetensors), dictionary_learning "
    "(config.json, ae.pt), or a matrix in an .npy file"
)
SUBFOLDERS = 1000  # looked at for a hint


def read_any_format(
    path: str | os.PathLike[str], *, normalize: bool = False, transpose: bool = False, lambda_: float | None = None
) -> SaeCoder | Dictionary:
    """Read an SAE, or an npy matrix as the dictionary of a lasso.

    Args:
        path: a folder of SAELens, sparsify or dictionary_learning, or an npy file.
        normalize, transpose, lambda_: of an npy file; see
            :func:`~mlsm_plugin.sparse_coding.formats.npy_matrix.read_npy_matrix`.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: the format is not known, the files are damaged, or this kind of SAE cannot be converted.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_file() and path.suffix == ".npy":
        return read_npy_matrix(path, normalize=normalize, transpose=transpose, lambda_=lambda_)
    given = {"--normalize": normalize, "--transpose": transpose, "--lambda": lambda_ is not None}
    for flag in (flag for flag, value in given.items() if value):
        raise ValueError(f"{flag} is for a matrix in an .npy file, which {path} is not")
    return _reader_of(path)(path)


def _reader_of(path: Path) -> Callable[[Path], SaeCoder]:
    if path.is_file():
        hint = f"; pass the folder {path.parent}" if path.name in FOLDERS else ""
        raise ValueError(f"{path} is of no known format{hint or f': known are {KNOWN}'}")
    found = [name for name in FOLDERS if (path / name).exists()]
    if len(found) > 1:
        raise ValueError(f"{path} holds {' and '.join(found)}, which are of different programs; keep one of them")
    if not found:
        raise ValueError(f"{path} holds no dictionary of a known format{_hint(path)}")
    config, reader = FOLDERS[found[0]]
    if not (path / config).exists():
        raise ValueError(f"{path} holds {found[0]}, but not {config}, which belongs to it")
    return reader


def _hint(path: Path) -> str:
    for number, below in enumerate(sorted(path.iterdir())):
        if number < SUBFOLDERS and below.is_dir() and any((below / name).exists() for name in FOLDERS):
            return f"; its subfolders do, such as {below}"
    return f": known are {KNOWN}"
