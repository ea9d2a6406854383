"""Fixtures of several tests in this folder; a module may have its own under the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import made_once, mlsm
from tests.huggingface.coded_model import CodedModel, coded_model
from tests.huggingface.tiny_adaptation import write_start


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> CodedModel:
    """A small model with its text and a dictionary."""
    return coded_model(tmp_path_factory, english_text[0])


@pytest.fixture(scope="module")
def codes(coded: CodedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The codes of the text."""
    return made_once(tmp_path_factory, "stored-codes", lambda root: mlsm(*coded.words(root / "codes"))) / "codes"


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> Path:
    """A folder with a text and a model, from which an adaptation starts."""
    return made_once(tmp_path_factory, "start-of-adaptation", lambda root: write_start(root, english_text[0]))
