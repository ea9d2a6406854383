"""What the tests of the page show."""

from __future__ import annotations

import pytest

from mlsm_plugin.explore.explorer import Explorer
from tests.explore.explored import Folders, explored, opened
from tests.tiny_models import TinyData


@pytest.fixture(scope="session")
def folders(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return explored(tmp_path_factory, tiny.text)


@pytest.fixture(scope="session")
def explorer(folders: Folders) -> Explorer:
    return opened(folders)
