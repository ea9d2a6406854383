"""Import a script of ``scripts/`` as a module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.conftest import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))  # where Python finds the parts of a script that is started
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def runner_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs a script with some words in this process; returns its exit status."""

    def run(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        status: int = module.main()
        return status

    return run
