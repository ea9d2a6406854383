"""Read a dictionary of any known format, recognized by its files; this module reads npy files itself."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.files.json_checks import JsonObject
from mlsm_plugin.core.files.npy_files import read_npy
from mlsm_plugin.core.sparse_coding.dictionary import UNIT_NORM_TOLERANCE, AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.formats import dictionary_learning, saelens, sparsify
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder

# file of weights -> file of settings, reader
FOLDERS: dict[str, tuple[str, Callable[[Path], SaeCoder]]] = {
    saelens.WEIGHTS_FILE: (saelens.CONFIG_FILE, saelens.read_saelens),
    sparsify.WEIGHTS_FILE: (sparsify.CONFIG_FILE, sparsify.read_sparsify),
    dictionary_learning.WEIGHTS_FILE: (dictionary_learning.CONFIG_FILE, dictionary_learning.read_dictionary_learning),
}
KNOWN = (
    "SAELens (cfg.json, sae_weights.safetensors), sparsify (cfg.json, sae.safetensors), dictionary_learning "
    "(config.json, ae.pt), or a matrix in an .npy file"
)
SUBFOLDERS = 1000  # number of subfolders to search for a hint


def read_any_format(
    path: PathLike, *, normalize: bool = False, transpose: bool = False, lambda_: float | None = None
) -> SaeCoder | AtomDictionary:
    """Read a folder of SAELens, sparsify or dictionary_learning, or an npy file (see :func:`read_npy_matrix`).

    FileNotFoundError if there is nothing at ``path``; ValueError if the format is not known, the files are damaged, or
    this kind of SAE cannot be converted.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_file() and path.suffix == ".npy":
        return read_npy_matrix(path, normalize=normalize, transpose=transpose, lambda_=lambda_)
    npy_options = {"--normalize": normalize, "--transpose": transpose, "--lambda": lambda_ is not None}
    for flag in (flag for flag, value in npy_options.items() if value):
        raise ValueError(f"{flag} is only for a matrix in an .npy file, which {path} is not")
    if path.is_file():
        advice = f"; pass the folder {path.parent}" if path.name in FOLDERS else f": known are {KNOWN}"
        raise ValueError(f"{path} has no known format{advice}")
    names = [name for name in FOLDERS if (path / name).exists()]
    if len(names) > 1:
        raise ValueError(f"{path} holds {' and '.join(names)}, which belong to different programs; keep one of them")
    if not names:
        raise ValueError(f"{path} holds no dictionary of a known format{_hint(path)}")
    config, read = FOLDERS[names[0]]
    if not (path / config).exists():
        raise ValueError(f"{path} holds {names[0]}, but not {config}, which belongs to it")
    return read(path)


def _hint(path: Path) -> str:
    for below in sorted(path.iterdir())[:SUBFOLDERS]:
        if any((below / name).exists() for name in FOLDERS):
            return f"; its subfolders do, such as {below}"
    return f": known are {KNOWN}"


def read_npy_matrix(
    path: PathLike, *, normalize: bool = False, transpose: bool = False, lambda_: float | None = None
) -> AtomDictionary:
    """Read a matrix as the dictionary of a lasso.

    ValueError if the file is not such a matrix, an atom is zero, an atom does not have unit norm and ``normalize`` is
    False, or ``lambda_`` is out of range.

    Args:
        path: a file of shape (n_atoms, dim), real numbers.
        normalize: scale each atom to unit norm.
        transpose: the file is (dim, n_atoms).
        lambda_: weight of the L1 penalty, > 0; None: pass it to ``mlsm encode --lambda`` later.
    """
    if lambda_ is not None and not 0 < lambda_ < np.inf:
        raise ValueError(f"--lambda must be a positive number, got {lambda_}")
    array = read_npy(path)
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"{path} must be a matrix (n_atoms, dim) of real numbers, got {array.dtype} of the shape {array.shape}"
        )
    atoms = np.asarray(array.T if transpose else array, np.float32)
    if not np.isfinite(atoms).all():
        raise ValueError(f"{path} holds NaN, infinity or numbers beyond float32; all values must be finite")
    norms = np.linalg.norm(atoms, axis=1)
    if not norms.all():
        raise ValueError(f"{path}: atom {int(norms.argmin())} is zero; leave it out")
    if normalize:
        atoms = normalize_rows(atoms)
    elif (worst := float(np.abs(norms - 1).max())) > UNIT_NORM_TOLERANCE:
        row = int(np.abs(norms - 1).argmax())
        columns_are_atoms = np.abs(np.linalg.norm(atoms, axis=0) - 1).max() < min(worst, UNIT_NORM_TOLERANCE)
        advice = "its columns have, so pass --transpose" if columns_are_atoms else "pass --normalize to scale them"
        raise ValueError(f"{path}: row {row} has the norm {norms[row]:.4g}, but atoms have unit norm; {advice}")
    meta: JsonObject = {"imported_from": {"format": "npy", "file": Path(path).name}}
    if lambda_ is not None:
        meta["lambda"] = lambda_
    return AtomDictionary(atoms, meta)
