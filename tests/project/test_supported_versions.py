"""Versions that several files have to repeat, because each is read before the others, agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.conftest import REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
SUPPORTED = [minor for minor in range(40) if f"3.{minor}.0" in SpecifierSet(PYPROJECT["project"]["requires-python"])]


def test_the_newest_python_is_supported_in_all_its_versions() -> None:
    assert SpecifierSet(PYPROJECT["project"]["requires-python"]).contains(f"3.{SUPPORTED[-1]}.99")


def test_the_classifiers_name_the_supported_pythons() -> None:
    found = re.findall(r":: Python :: 3\.(\d+)\"", (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert [int(minor) for minor in found] == SUPPORTED


def test_ruff_checks_for_the_oldest_supported_python() -> None:
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py3{SUPPORTED[0]}"


def test_find_python_tries_the_supported_pythons_newest_first() -> None:
    script = (REPOSITORY / "scripts" / "find_python.sh").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^for version in (.*); do$", script, re.MULTILINE)
    assert listed.split() == [f"3.{minor}" for minor in reversed(SUPPORTED)]
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
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    asked = [Requirement(text) for group in (project["dependencies"], *extras) for text in group]
    compared = 0
    for pin in pins:
        for version in [one.version for one in pin.specifier if one.operator == "=="]:
            for requirement in asked:
                if requirement.name.lower() == pin.name.lower():
                    compared += 1
                    assert requirement.specifier.contains(version), f"{pin} against {requirement}"
    assert compared >= 12
