"""The kinds of sparse coders by name: load a coder from its folder, or register another kind.

from mlsm_plugin.core.sparse_coding.coder import load_coder

codes = load_coder("dictionary").encode(hidden).codes
"""

import dataclasses
from pathlib import Path
from typing import Any

from mlsm_plugin.core.files.atomic_files import PathLike, read_json
from mlsm_plugin.core.files.planned_folder import META_FILE
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_coder import InexactCodes, NoOptions, SparseCoder, SparseCodes

__all__ = ["InexactCodes", "NoOptions", "SparseCoder", "SparseCodes", "coder_kinds", "load_coder", "register_coder"]

_KINDS: dict[str, type[SparseCoder]] = {coder.kind: coder for coder in (LassoCoder, SaeCoder)}


def register_coder(coder: type[SparseCoder]) -> type[SparseCoder]:
    """A class decorator that registers a kind of coder; ValueError if another class has this kind."""
    known = _KINDS.setdefault(coder.kind, coder)
    if known is not coder:
        raise ValueError(
            f"the kind of coder {coder.kind!r} already belongs to {known.__qualname__}; choose another name"
        )
    return coder


def coder_kinds() -> dict[str, type[SparseCoder]]:
    """The registered kinds by name."""
    return dict(_KINDS)


def kind_of(directory: PathLike) -> type[SparseCoder]:
    """The class of the coder in a folder; ValueError, with the folder, if there is none or its kind is unknown."""
    path = Path(directory) / META_FILE
    if not path.is_file():
        raise ValueError(f"{directory} holds no {META_FILE}; make the dictionary with `mlsm dictionary`")
    meta = read_json(path)
    if isinstance(meta, dict) and not {"kind", "dim"} & meta.keys():
        raise ValueError(f"{directory} holds no dictionary: its {META_FILE} is of something else")
    kind = meta.get("kind", LassoCoder.kind) if isinstance(meta, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"{directory} holds a coder of the unknown kind {kind!r}; known kinds are {', '.join(sorted(_KINDS))}. If "
            "it comes from a plugin, name the plugin's folder with --user-dir"
        )
    return _KINDS[kind]


def load_coder(directory: PathLike, **options: Any) -> SparseCoder:
    """Load a coder of any registered kind from a folder that ``mlsm dictionary`` or its ``save`` wrote.

    ``options`` are fields of the kind's ``options_type``; fields left out get their defaults. ValueError if there is no
    coder, files are damaged, the kind is unknown, or it does not have an option.
    """
    kind = kind_of(directory)
    known = {field.name for field in dataclasses.fields(kind.options_type)}
    for name in options:
        if name not in known:
            flag = "--" + name.strip("_").replace("_", "-")
            raise ValueError(f"{directory} holds a coder of kind {kind.kind!r}, which has no option {flag}")
    return kind.load(directory, kind.options_type(**options))
