"""What the tests of the page show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explore.explored import explored
from tests.tiny_models import TinyData


@pytest.fixture(scope="session")
def folders(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return explored(tmp_path_factory, tiny.text)
