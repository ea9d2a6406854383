"""Fixtures of the tests of several commands: data without codes, codes, and a model with a datastore."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.coding_runs import SHARDS, contents, copy_without_codes, encode_words, split_tokens, start_mlsm
from tests.conftest import Pipeline, made_once, mlsm
from tests.tiny_models import TinyData, save_untrained_npm


@pytest.fixture(scope="session")
def uninterrupted(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The codes of the valid split in several shards, written in one go by one process."""

    def make(root: Path) -> None:
        data = copy_without_codes(pipeline.data_bin, root / "data-bin")
        run = start_mlsm(*encode_words(pipeline, data, *SHARDS))
        errors = run.communicate()[1]
        assert run.returncode == 0, errors

    codes = contents(made_once(tmp_path_factory, "uninterrupted", make) / "data-bin" / "valid.codes")
    assert len([name for name in codes if name.endswith("indptr.npy")]) >= 8
    return codes


@pytest.fixture
def data_bin(pipeline: Pipeline, tmp_path: Path) -> Path:
    """A copy of the dataset without codes."""
    return copy_without_codes(pipeline.data_bin, tmp_path / "data-bin")


@pytest.fixture(scope="module")
def valid_tokens(pipeline: Pipeline) -> np.ndarray:
    """All tokens of the valid split; content tokens are above 2."""
    return np.concatenate(split_tokens(pipeline.data_bin, "valid"))


@pytest.fixture(scope="module")
def npm(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model; its datastore lies next to it in ``store``."""
    root = tmp_path_factory.mktemp("npm")
    checkpoint = save_untrained_npm(tiny, root / "model")
    mlsm("npm", "datastore", tiny.data_bin, "--checkpoint", checkpoint, "--output", root / "model" / "store")
    return checkpoint
