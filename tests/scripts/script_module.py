"""Import a script of ``scripts/`` as a module."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

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
