"""The format of a folder is told by its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding.formats.any_format import read_any_format
from tests.core.sparse_coding.formats.foreign_saes import (
    saelens_config,
    write_dictionary_learning,
    write_saelens,
    write_sparsify,
)


def test_each_format_is_known_by_its_files(tmp_path: Path) -> None:
    write_saelens(tmp_path / "saelens", saelens_config("topk"))
    write_sparsify(tmp_path / "sparsify")
    write_dictionary_learning(tmp_path / "dictionary_learning", "AutoEncoder")
    np.save(tmp_path / "npy.npy", np.eye(3))
    for name in ("saelens", "sparsify", "dictionary_learning", "npy.npy"):
        found = read_any_format(tmp_path / name)
        assert found.meta["imported_from"]["format"] == name.removesuffix(".npy")
    for flags, problem in (
        ({"normalize": True}, "--normalize is only for a matrix"),
        ({"transpose": True}, "--transpose is only for a matrix"),
        ({"lambda_": 0.1}, "--lambda is only for a matrix"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_any_format(tmp_path / "sparsify", **flags)
        read_any_format(tmp_path / "npy.npy", **flags)


def test_hints(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_any_format(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"no dictionary of a known format: known are SAELens \(cfg.json"):
        read_any_format(tmp_path)
    write_sparsify(tmp_path / "layers.5")
    with pytest.raises(ValueError, match=r"its subfolders do, such as \S+layers\.5"):
        read_any_format(tmp_path)
    with pytest.raises(ValueError, match=r"has no known format; pass the folder \S+layers\.5"):
        read_any_format(tmp_path / "layers.5" / "sae.safetensors")
    with pytest.raises(ValueError, match="has no known format: known are"):
        read_any_format(tmp_path / "layers.5" / "cfg.json")
    write_saelens(tmp_path / "layers.5", saelens_config("topk"))
    with pytest.raises(ValueError, match=r"holds sae_weights\.safetensors and sae\.safetensors"):
        read_any_format(tmp_path / "layers.5")
    write_dictionary_learning(tmp_path / "other", "AutoEncoder")
    (tmp_path / "other" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds ae\.pt, but not config\.json"):
        read_any_format(tmp_path / "other")
