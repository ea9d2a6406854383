"""A dictionary that differs from the shared one in what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from tests.conftest import Pipeline


def changed_dictionary(pipeline: Pipeline, folder: Path, **changes: Any) -> Path:
    """The shared dictionary with other meta data; a value of None leaves a key out."""
    dictionary = AtomDictionary.load(pipeline.dictionary)
    width = changes.pop("dim", dictionary.atoms.shape[1])
    meta = {key: value for key, value in {**dictionary.meta, **changes, "dim": width}.items() if value is not None}
    atoms = dictionary.atoms[:, :width]
    AtomDictionary(atoms / np.linalg.norm(atoms, axis=1, keepdims=True), meta).save(folder)
    return folder
