"""A small encoder with a dictionary of its layer 1, and documents."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from mlsm_plugin.core.files.hf_files import HF_PREFIX
from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from tests.tiny_hf_models import make_model_with_own_tokens

ATOMS = 40


def make_encoder(text: Path, folder: Path) -> tuple[Path, Path]:
    """Folders of a model and of a dictionary over its layer 1."""
    model = make_model_with_own_tokens("bert", text, folder / "bert")
    width = HuggingFaceSource.width_of(f"{HF_PREFIX}{model}")
    atoms = np.random.default_rng(0).normal(size=(ATOMS, width or 0))
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    fingerprint = HuggingFaceSource.fingerprint_of(model)
    meta = {"lambda": 0.05, "layer": 1, "auxiliary_fingerprint": fingerprint}
    AtomDictionary(atoms.astype(np.float32), meta).save(folder / "dictionary")
    return model, folder / "dictionary"


def write_documents(text: Path, path: Path, *, number: int = 30, seed: int = 1) -> list[str]:
    """Documents of one line each, of words of a text; returns the lines."""
    words = text.read_text().split()
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(words, k=rng.randint(3, 12))) for _ in range(number)]
    path.write_text("\n\n".join(lines) + "\n")
    return lines
