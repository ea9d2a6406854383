"""The registry of coders: which kinds there are, and loading a folder of any kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding import coder as registry
from mlsm_plugin.core.sparse_coding.coder import coder_kinds, kind_of, load_coder, register_coder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder, LassoOptions
from tests.core.sparse_coding.threshold_coder import ThresholdCoder

ATOMS = normalize_rows(np.random.default_rng(1).standard_normal((9, 5)).astype(np.float32))
HIDDEN = np.random.default_rng(2).standard_normal((20, 5)).astype(np.float32)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it, and what others registered is not there."""
    monkeypatch.setattr(registry, "_KINDS", {LassoCoder.kind: LassoCoder})


@pytest.fixture
def dictionary(tmp_path: Path) -> Path:
    AtomDictionary(ATOMS, {"lambda": 0.05, "layer": 5}).save(tmp_path / "dictionary")
    return tmp_path / "dictionary"


def changed_meta(folder: Path, *without: str, **values: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    meta = {name: value for name, value in meta.items() if name not in without}
    (folder / "meta.json").write_text(json.dumps({**meta, **values}))


def test_kinds_are_known_by_name() -> None:
    assert coder_kinds() == {"lasso": LassoCoder}
    assert register_coder(ThresholdCoder) is ThresholdCoder
    assert coder_kinds() == {"lasso": LassoCoder, "threshold": ThresholdCoder}
    coder_kinds().clear()
    assert len(coder_kinds()) == 2


def test_a_kind_belongs_to_one_class() -> None:
    register_coder(ThresholdCoder)
    register_coder(ThresholdCoder)
    second = type("Second", (ThresholdCoder,), {"kind": "lasso"})
    with pytest.raises(ValueError, match="the kind of coder 'lasso' already belongs to LassoCoder; choose"):
        register_coder(second)
    assert coder_kinds() == {"lasso": LassoCoder, "threshold": ThresholdCoder}


def test_a_coder_of_another_kind_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    register_coder(ThresholdCoder)
    saved = ThresholdCoder(ATOMS, {"layer": 3})
    saved.save(tmp_path)
    loaded = load_coder(tmp_path)
    assert type(loaded) is ThresholdCoder is kind_of(tmp_path)
    assert (loaded.num_atoms, loaded.dim, loaded.meta["layer"]) == (9, 5, 3)
    assert loaded.fingerprint == saved.fingerprint
    np.testing.assert_array_equal(loaded.encode(HIDDEN).codes.toarray(), saved.encode(HIDDEN).codes.toarray())
    strict = load_coder(str(tmp_path), at_least=1.0).encode(HIDDEN).codes
    assert 0 < strict.nnz < saved.encode(HIDDEN).codes.nnz
    assert strict.data.min() > 1
    with pytest.raises(ValueError, match="--at-least must not be negative, got -1"):
        load_coder(tmp_path, at_least=-1)


def test_the_lasso_comes_back_as_it_was_saved(dictionary: Path, tmp_path: Path) -> None:
    made = LassoCoder(AtomDictionary(ATOMS, {"lambda": 0.05, "layer": 5}))
    first = load_coder(dictionary)
    first.save(tmp_path / "copy")
    again = load_coder(tmp_path / "copy")
    for loaded in (first, again):
        assert type(loaded) is LassoCoder
        assert loaded.meta == made.meta == {"kind": "lasso", "lambda": 0.05, "layer": 5, "n_atoms": 9, "dim": 5}
        assert loaded.fingerprint == made.fingerprint
        found, expected = (coder.encode(HIDDEN, threads=1) for coder in (loaded, made))
        assert (found.codes != expected.codes).nnz == 0
        np.testing.assert_array_equal(found.gap, expected.gap)
    for name in ("dictionary.npy", "meta.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (dictionary / name).read_bytes()


def test_folders_of_version_01_are_the_lasso(dictionary: Path) -> None:
    expected = load_coder(dictionary)
    changed_meta(dictionary, "kind")
    assert kind_of(dictionary) is LassoCoder
    loaded = load_coder(dictionary, lambda_=0.2)
    assert isinstance(loaded, LassoCoder)
    assert loaded.options == LassoOptions(lambda_=0.2)
    assert (loaded.fingerprint, loaded.meta) == (expected.fingerprint, expected.meta)


@pytest.mark.parametrize("kind", ["threshold", "Lasso", "", None, 3])
def test_kinds_that_nobody_registered_are_refused_by_folder(dictionary: Path, kind: object) -> None:
    changed_meta(dictionary, kind=kind)
    with pytest.raises(
        ValueError, match=rf"dictionary holds a coder of the unknown kind {kind!r}; known kinds are lasso\..*--user"
    ):
        load_coder(dictionary)


def test_folders_without_a_coder_are_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=rf"{folder} holds no meta\.json; make the dictionary with `mlsm dict"):
            load_coder(folder)
    (tmp_path / "meta.json").write_text('{"max_length": 512}')  # of token sequences
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no dictionary: its meta\.json is of something else"):
        load_coder(tmp_path)
    (tmp_path / "meta.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=f"{tmp_path} holds a coder of the unknown kind None"):
        load_coder(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json"):
        load_coder(tmp_path)


@pytest.mark.parametrize(
    ("option", "flag"), [("at_least", "--at-least"), ("device", "--device"), ("sparsity_", "--sparsity")]
)
def test_options_of_other_kinds_are_refused_by_flag(dictionary: Path, option: str, flag: str) -> None:
    with pytest.raises(ValueError, match=f"holds a coder of kind 'lasso', which has no option {flag}$"):
        load_coder(dictionary, **{option: 1})
