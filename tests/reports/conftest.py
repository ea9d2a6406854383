"""A coded dataset for the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockSettings
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split
from tests.core.coding.toy_coder import ToyCoder
from tests.tiny_models import TinyData


@pytest.fixture(scope="module")
def coded(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a coded ``data-bin``."""
    root = tmp_path_factory.mktemp("coded")
    settings = CodingSettings(layer=1, blocks=BlockSettings(24))
    coder = ToyCoder(health={"unused_atoms": 3, "reconstruction_error": 0.25})
    encode_split(tiny.copy(root / "data-bin"), "train", auxiliary=tiny.model, coder=coder, settings=settings)
    return root
