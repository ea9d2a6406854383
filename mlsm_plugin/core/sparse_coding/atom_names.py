"""Names of atoms that a person or another program gave, such as Delphi or Neuronpedia."""

import re
from collections.abc import Iterable
from pathlib import Path

from mlsm_plugin.core.files.atomic_files import PathLike, read_json

OF_DELPHI = re.compile(r"(.*)latent(\d+)\.txt")  # module and number, in the name of a file of its explanations
KEYS = (("index", "description"), ("atom", "name"))  # in a list of objects: Neuronpedia's, and a plain one


def read_names(path: PathLike, num_atoms: int) -> dict[int, str]:
    """The names of some atoms by their numbers, whitespace in each as single spaces; empty ones are left out.

    Args:
        path: a JSON file with an object of atom to name, or with a list of objects that have ``index`` and
            ``description`` (Neuronpedia) or ``atom`` and ``name``; or Delphi's folder of explanations, with a file
            ``..._latent17.txt`` for atom 17.
        num_atoms: atoms of the dictionary.

    Raises:
        ValueError: the file has another form, an atom has two names, there is no such atom, or the folder has names for
            several modules.
        OSError: there is no such file.
    """
    path = Path(path)
    pairs = _of_folder(path) if path.is_dir() else _of_json(read_json(path), path)
    names: dict[int, str] = {}
    for key, name in pairs:
        atom = _number(key)
        if atom is None or not isinstance(name, str):
            raise ValueError(f"{path}: expected the number of an atom and a text, got {key!r}: {name!r:.80}")
        if atom >= num_atoms:
            raise ValueError(
                f"{path} names atom {atom}, but there are only {num_atoms:,}, numbered from 0; pass names of this "
                "dictionary"
            )
        if atom in names:
            raise ValueError(f"{path} names atom {atom} twice; keep one of the names")
        names[atom] = " ".join(name.split())
    return {atom: name for atom, name in names.items() if name}


def _of_folder(folder: Path) -> Iterable[tuple[object, object]]:
    files = {path: OF_DELPHI.fullmatch(path.name) for path in sorted(folder.iterdir())}
    named = [(match[2], read_json(path)) for path, match in files.items() if match is not None]
    modules = sorted({match[1].rstrip("_") for match in files.values() if match is not None})
    if len(modules) > 1:
        raise ValueError(
            f"{folder} names latents of several modules: {', '.join(modules)}; pass a folder with those of one of them"
        )
    if not named:
        raise ValueError(f"{folder} has no names of atoms; pass a JSON file, or Delphi's folder of explanations")
    return named


def _of_json(value: object, path: Path) -> Iterable[tuple[object, object]]:
    if isinstance(value, dict) and value:
        return value.items()
    if isinstance(value, list):
        for keys in KEYS:
            if value and all(isinstance(item, dict) and set(keys) <= set(item) for item in value):
                return [(item[keys[0]], item[keys[1]]) for item in value]
    raise ValueError(
        f"{path} has no names of atoms; expected an object of atom to name, or a list of objects with "
        + " or ".join(" and ".join(keys) for keys in KEYS)
    )


def _number(key: object) -> int | None:
    """The number of an atom; None if ``key`` is none."""
    text = str(key)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
