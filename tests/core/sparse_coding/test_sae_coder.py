"""Sparse autoencoders as coders: files, codes and reconstructions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mlsm_plugin.core.sparse_coding import sae_coder
from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import ACTIVATIONS, SaeConfig, SparseAutoencoder
from tests.core.sparse_coding.sae_weights import random_weights

NUM_ATOMS, DIM = 24, 8


def make_coder(activation: str, seed: int = 0) -> SaeCoder:
    config = SaeConfig(activation, 5 if activation == "topk" else None, input_norm="constant_norm")
    return SaeCoder(SparseAutoencoder(config, random_weights(config, NUM_ATOMS, DIM, seed)), {"layer": 2})


def hidden_states(rows: int = 50) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(rows, DIM)).astype(np.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saved_and_loaded_coders_give_the_same_codes(activation: str, tmp_path: Path) -> None:
    coder, hidden = make_coder(activation), hidden_states()
    coder.save(tmp_path)
    loaded = load_coder(tmp_path)
    assert isinstance(loaded, SaeCoder)
    assert loaded.meta == json.loads((tmp_path / "meta.json").read_text())
    assert (loaded.meta["layer"], loaded.num_atoms, loaded.dim) == (2, NUM_ATOMS, DIM)
    assert loaded.fingerprint == coder.fingerprint != make_coder(activation, seed=1).fingerprint
    assert (loaded.encode(hidden).codes != coder.encode(torch.from_numpy(hidden)).codes).nnz == 0
    assert not [path.name for path in tmp_path.iterdir() if path.suffix not in (".npy", ".json")]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_codes_are_the_latents_in_canonical_form(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coder, hidden = make_coder(activation), hidden_states()
    monkeypatch.setattr(sae_coder, "DENSE_ENTRIES", 7 * NUM_ATOMS)  # several parts
    threads = torch.get_num_threads()
    coded = coder.encode(hidden, threads=1)
    assert torch.get_num_threads() == threads
    codes = coded.codes
    assert coded.gap is None
    assert codes.dtype == np.float32
    assert (codes.data > 0).all()
    assert codes.has_canonical_format
    latents = coder.sae.latents(torch.from_numpy(hidden))
    assert np.allclose(codes.toarray(), latents.numpy(), atol=1e-5)
    wanted = coder.sae.reconstructed(latents, torch.from_numpy(hidden)).numpy()
    assert np.allclose(coder.reconstruct(hidden, codes), wanted, atol=1e-5)
    assert coder.encode(hidden[:0]).codes.shape == (0, NUM_ATOMS)
    assert coder.reconstruct(hidden[:0], codes[:0]).shape == (0, DIM)


def test_hidden_states_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(n_tokens, 8\), got \(2, 7\)"):
        make_coder("relu").encode(np.zeros((2, 7), np.float32))


def changed(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        (meta["sae"] if name in meta["sae"] else meta)[name] = value
        (folder / "meta.json").write_text(json.dumps(meta))

    return change


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (changed("activation", "tanh"), "'tanh' is not one of"),
        (changed("activation", 3), "activation: 3 is not text"),
        (changed("k", -1), "k: -1 is not a whole number"),
        (changed("k", 1000), "only 24 latents"),
        (changed("subtract_decoder_bias", "no"), "true or false"),
        (changed("sae", []), "sae: .* is not a dictionary"),
        (changed("n_atoms", 3), "says n_atoms 3 but the encoder has 24"),
        (lambda folder: (folder / "encoder.npy").unlink(), r"encoder\.npy"),
        (lambda folder: (folder / "decoder.npy").write_bytes(b"x"), r"decoder\.npy"),
        (lambda folder: np.save(folder / "encoder_bias.npy", np.full(NUM_ATOMS, np.nan, np.float32)), "NaN"),
        (lambda folder: np.save(folder / "encoder.npy", np.zeros((3, 3), np.float32)), "shape"),
    ],
)
def test_damaged_folders_are_one_line(damage: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    make_coder("topk").save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=problem) as caught:
        load_coder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
