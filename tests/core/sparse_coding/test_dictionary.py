"""Learning, saving, loading and evaluating dictionaries."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from mlsm_plugin.core.files.atomic_files import sha256_of_files
from mlsm_plugin.core.files.progress import Progress
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary, learn_dictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.core.sparse_coding.online_learning import mini_batches
from mlsm_plugin.core.sparse_coding.quality import coder_health

LEARNING = {"num_atoms": 12, "lambda_": 0.05, "iterations": 30, "batch_size": 50, "threads": 1, "seed": 3}


@pytest.fixture
def hidden():
    """600 sparse non-negative mixtures of 12 directions in 16 dimensions."""
    rng = np.random.default_rng(0)
    truth = normalize_rows(rng.standard_normal((12, 16)))
    weights = rng.random((600, 12)) * (rng.random((600, 12)) < 0.2)
    weights[:, 0] += 1e-3
    return normalize_rows((weights @ truth).astype(np.float32))


@pytest.fixture
def atoms():
    return normalize_rows(np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32))


def test_learned_atoms_are_unit_rows_that_reconstruct(hidden):
    learned = learn_dictionary(hidden, **LEARNING)
    assert learned.shape == (12, 16)
    assert learned.dtype == np.float32
    assert learned.flags.c_contiguous
    np.testing.assert_allclose(np.linalg.norm(learned, axis=1), 1, atol=1e-6)
    untrained = normalize_rows(np.random.default_rng(5).standard_normal((12, 16)))
    error, before = (
        coder_health(hidden, LassoCoder(AtomDictionary(atoms, {"lambda": 0.05})), threads=1)["reconstruction_error"]
        for atoms in (learned, untrained)
    )
    assert error < 0.5 * before


@pytest.mark.parametrize("backend", ["torch", "spams"])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_seed_gives_the_same_bytes(hidden, threads, backend):
    settings = {**LEARNING, "threads": threads, "backend": backend}
    first = learn_dictionary(hidden, **settings).tobytes()
    np.random.seed(9)  # spams must not listen to the global generators
    torch.manual_seed(9)
    assert learn_dictionary(hidden, **settings).tobytes() == first
    assert learn_dictionary(torch.from_numpy(hidden), **settings).tobytes() == first
    assert learn_dictionary(hidden, **{**settings, "seed": 4}).tobytes() != first


def test_learning_does_not_need_its_progress_bar(hidden, monkeypatch):
    expected = learn_dictionary(hidden, **LEARNING, backend="spams").tobytes()
    hidden_bar = partial(Progress, disable=True)  # as with TQDM_DISABLE
    monkeypatch.setattr("mlsm_plugin.core.sparse_coding.spams_backend.Progress", hidden_bar)
    monkeypatch.setattr(
        "mlsm_plugin.core.sparse_coding.dictionary.mini_batches", lambda *given: islice(mini_batches(*given), 3)
    )
    assert learn_dictionary(hidden, **LEARNING, backend="spams").tobytes() == expected


def test_input_is_left_alone(hidden):
    before = hidden.copy()
    hidden.flags.writeable = False
    learn_dictionary(hidden, **LEARNING)
    np.testing.assert_array_equal(hidden, before)


def test_atoms_that_nothing_uses_still_have_unit_norm():
    rng = np.random.default_rng(0)
    few = normalize_rows(np.abs(rng.standard_normal((40, 3))).astype(np.float32))
    learned = learn_dictionary(few, **{**LEARNING, "num_atoms": 40, "lambda_": 5.0, "batch_size": 1000})
    np.testing.assert_allclose(np.linalg.norm(learned, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lambda_": 0.0}, "lambda_ must be a positive number, got 0.0"),
        ({"num_atoms": 0}, "num_atoms must be >= 1, got 0"),
        ({"iterations": -5}, "iterations must be >= 1, got -5"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"num_atoms": 601}, "num_atoms is 601 but hidden has only"),
    ],
)
def test_learning_errors(hidden, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        learn_dictionary(hidden, **{**LEARNING, **change})


def test_learning_rejects_bad_samples(hidden):
    with pytest.raises(ValueError, match=re.escape("hidden must be 2-D (n_tokens, dim), got the shape (16,)")):
        learn_dictionary(hidden[0], **LEARNING)
    hidden[7, 0] = np.inf
    with pytest.raises(ValueError, match="hidden row 7 holds NaN or infinity"):
        learn_dictionary(hidden, **LEARNING)


def test_repeated_and_zero_rows_are_no_distinct_samples():
    repeated = np.repeat(np.eye(4, dtype=np.float32), 20, axis=0)
    repeated = np.concatenate([repeated, 2 * repeated, np.zeros((5, 4), np.float32)])
    learn_dictionary(repeated, **{**LEARNING, "num_atoms": 4})
    message = "num_atoms is 5 but hidden has only 4 distinct non-zero rows; sample more tokens or ask for fewer atoms"
    with pytest.raises(ValueError, match=message):
        learn_dictionary(repeated, **{**LEARNING, "num_atoms": 5})


def test_save_and_load_are_symmetrical(atoms, tmp_path):
    dictionary = AtomDictionary(atoms, {"lambda": 0.05, "layer": 5})
    dictionary.save(tmp_path / "d")
    loaded = AtomDictionary.load(tmp_path / "d")
    np.testing.assert_array_equal(loaded.atoms, atoms)
    assert loaded.meta == dictionary.meta == {"kind": "lasso", "lambda": 0.05, "layer": 5, "n_atoms": 6, "dim": 4}
    assert loaded.fingerprint == dictionary.fingerprint == sha256_of_files(tmp_path / "d" / "dictionary.npy")
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["dictionary.npy", "meta.json"]


def test_interrupted_save_is_not_whole(atoms, tmp_path, monkeypatch):
    AtomDictionary(atoms).save(tmp_path)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlsm_plugin.core.sparse_coding.dictionary.write_json", full_disk)
    with pytest.raises(OSError, match="No space left"):
        AtomDictionary(atoms[::-1]).save(tmp_path)
    with pytest.raises(ValueError, match=r"holds no meta\.json; make the dictionary with `mlsm dictionary`"):
        AtomDictionary.load(tmp_path)


def test_load_names_what_is_wrong(atoms, tmp_path):
    with pytest.raises(ValueError, match=r"holds no dictionary\.npy; make the dictionary with `mlsm dictionary`"):
        AtomDictionary.load(tmp_path)
    AtomDictionary(atoms).save(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"n_atoms": 7, "dim": 4}))
    with pytest.raises(ValueError, match=r"meta\.json says n_atoms 7 but dictionary\.npy has 6"):
        AtomDictionary.load(tmp_path)
    (tmp_path / "dictionary.npy").write_bytes((tmp_path / "dictionary.npy").read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"dictionary\.npy is not a readable npy file"):
        AtomDictionary.load(tmp_path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3), "a dictionary must be 2-D (n_atoms, dim) and not empty, got the shape (3,)"),
        (np.ones((0, 3)), "got the shape (0, 3)"),
        (np.full((2, 2), np.nan), "atom 0 holds NaN or infinity"),
        (np.array([[1.0, 0.0], [2.0, 0.0]]), "atom 1 has the norm 2; every atom (row) must have the norm 1"),
    ],
)
def test_dictionary_validates(array, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AtomDictionary(array)


def test_health_of_an_identity_dictionary_by_hand():
    # Soft thresholding at 0.1: (0.7, 0, 0.5, 0) and (0.9, 0, 0, 0); residuals (0.1, 0, 0.1, 0) and (0.1, 0, 0, 0).
    sample = np.array([[0.8, 0.0, 0.6, 0.0], [1.0, 0.0, 0.0, 0.0]])
    health = coder_health(sample, LassoCoder(AtomDictionary(np.eye(4), {"lambda": 0.1})))
    error = health.pop("reconstruction_error")
    assert health == {"n_tokens": 2, "n_atoms": 4, "unused_atoms": 2, "mean_nonzeros": 1.5}
    assert error == pytest.approx((0.03 / 2) ** 0.5, rel=1e-5)
    json.dumps(health)


def test_health_of_zeros():
    health = coder_health(np.zeros((2, 4)), LassoCoder(AtomDictionary(np.eye(4), {"lambda": 0.1})))
    assert (health["reconstruction_error"], health["unused_atoms"]) == (0, 4)
