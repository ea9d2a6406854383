"""Import a script of ``scripts/`` or ``research/`` as a module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.conftest import REPOSITORY


def load_script(path: str) -> ModuleType:
    """The script at ``path``, such as ``research/copying.py``."""
    file = REPOSITORY / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # where Python finds the parts of a script that is started
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def runner_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs a script with some words in this process; returns its exit status."""

    def run(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        status: int = module.main()
        return status

    return run
