"""Versions that several files have to repeat, because each is read before the others, agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.conftest import REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
TEXT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
SUPPORTED = [int(minor) for minor in re.findall(r":: Python :: 3\.(\d+)\"", TEXT)]


def test_the_required_pythons_are_the_supported_ones_and_newer() -> None:
    """What works with Hugging Face needs no fairseq, which the newest Python may not have."""
    required = SpecifierSet(PYPROJECT["project"]["requires-python"])
    assert [minor for minor in range(40) if f"3.{minor}.0" in required] == [*range(SUPPORTED[0], 40)]
    (marker,) = [Requirement(text).marker for text in PYPROJECT["project"]["optional-dependencies"]["fairseq"][:1]]
    assert marker is not None
    with_fairseq = [minor for minor in range(SUPPORTED[0], 40) if marker.evaluate({"python_version": f"3.{minor}"})]
    assert with_fairseq == SUPPORTED


def test_ruff_checks_for_the_oldest_supported_python() -> None:
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py3{SUPPORTED[0]}"


def test_find_python_tries_the_supported_pythons_those_with_a_wheel_of_fairseq_first() -> None:
    script = (REPOSITORY / "scripts" / "find_python.sh").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^for version in (.*); do$", script, re.MULTILINE)
    assert listed.split() == ["3.12", *(f"3.{minor}" for minor in reversed(SUPPORTED) if minor != 12)]
    *others, last = listed.split()
    assert f"no usable Python {', '.join(others)} or {last} found" in script


def test_find_python_prints_a_supported_interpreter() -> None:
    folder = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    script = str(REPOSITORY / "scripts" / "find_python.sh")
    found = subprocess.run(["sh", script], capture_output=True, text=True, check=True, env=environment).stdout.strip()
    code = "import sys; print(sys.version_info[:2])"
    printed = subprocess.run([found, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
    assert printed.strip() in {str((3, minor)) for minor in SUPPORTED}


def test_the_pinned_versions_satisfy_the_requirements() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    asked = [Requirement(text) for text in metadata.requires("mlsm_plugin") or []]
    compared = 0
    for pin in pins:
        for version in [one.version for one in pin.specifier if one.operator == "=="]:
            for requirement in asked:
                if requirement.name.lower() == pin.name.lower():
                    compared += 1
                    assert requirement.specifier.contains(version), f"{pin} against {requirement}"
    assert compared >= 12
