"""Fixtures of the coding commands' tests."""

from __future__ import annotations

import pytest

from tests.cli.coding_runs import SHARDS, contents, copy_without_codes, encode_words, start_mlsm
from tests.conftest import Pipeline


@pytest.fixture(scope="session")
def uninterrupted(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The codes of the valid split in several shards, written in one go by one process."""
    data = copy_without_codes(pipeline.data_bin, tmp_path_factory.mktemp("uninterrupted") / "data-bin")
    run = start_mlsm(*encode_words(pipeline, data, *SHARDS))
    errors = run.communicate()[1]
    assert run.returncode == 0, errors
    codes = contents(data / "valid.codes")
    assert len([name for name in codes if name.endswith("indptr.npy")]) >= 8
    return codes
