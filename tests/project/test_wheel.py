"""The wheel that pip builds, and the package installed from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from mlsm_plugin.version import __version__
from tests.conftest import REPOSITORY

pytest.importorskip("setuptools", minversion="70.1", reason="older ones need the package `wheel` to build one")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
FAIRSEQ = 'fairseq-fixed>=0.12.3; python_version < "3.14"'
SOURCES = (
    *("mlsm_plugin", "tests", "scripts", "research", "examples"),
    *("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_sources(folder / "source")
    build = [*PIP, "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    result = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False, env=clean_environment())
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A folder with the installed wheel, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def copy_sources(folder: Path) -> Path:
    """A copy to build in, since a build leaves files in its folder."""
    folder.mkdir(parents=True)
    for name in SOURCES:
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, folder / name)
    return folder


def clean_environment() -> dict[str, str]:
    """Without what would let a child process see this checkout, or the pins."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PIP_"))}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"mlsm_plugin-{__version__}.dist-info/METADATA").decode())


@pytest.mark.slow
def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"mlsm_plugin-{__version__}.dist-info/entry_points.txt").decode()
    modules = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "mlsm_plugin").rglob("*.py")}
    data = {"mlsm_plugin/py.typed", "mlsm_plugin/reports/latent_report.html", "mlsm_plugin/explore/page.css"}
    assert {name for name in names if ".dist-info/" not in name} == modules | data
    assert any(name.endswith("/LICENSE") for name in names)
    assert entry_points.split() == ["[console_scripts]", "mlsm", "=", "mlsm_plugin.cli.main:main"]


@pytest.mark.slow
def test_an_editable_installation_is_found_before_a_folder_of_its_name(tmp_path: Path) -> None:
    source, packages = copy_sources(tmp_path / "clone" / "mlsm_plugin"), tmp_path / "packages"
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    result = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False, env=clean_environment()
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # what fairseq does with --user-dir mlsm_plugin in the folder that the clone is in
    look = f"import site, sys; site.addsitedir({str(packages)!r}); sys.path.insert(0, ''); import mlsm_plugin as it"
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"{look}; print(it.__file__)"],
        cwd=source.parent, capture_output=True, text=True, check=False, env=clean_environment(),
    )  # fmt: skip
    assert found.stdout.strip() == str(source / "mlsm_plugin" / "__init__.py"), found.stderr


@pytest.mark.slow
def test_the_metadata_says_what_pip_and_a_reader_need(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Version"] == __version__
    assert metadata["License"] == "MIT"
    pythons = SpecifierSet(metadata["Requires-Python"])
    versions = ("3.10.18", "3.11.0", "3.13.9", "3.14.0")
    assert [version in pythons for version in versions] == [False, True, True, True]
    assert metadata.get_all("Provides-Extra") == [
        "fairseq",
        "retrieval",
        "plot",
        "hf",
        "explore",
        "lora",
        "datatrove",
        "docs",
        "test",
    ]
    requirements = set(metadata.get_all("Requires-Dist"))
    assert {FAIRSEQ, "spams-bin>=2.6", "torch>=2.6", 'faiss-cpu>=1.8; extra == "retrieval"'} <= requirements
    assert len(metadata.get_all("Project-URL")) == 4
    assert metadata.get_payload().startswith("# mlsm_plugin\n")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A source distribution and the wheel made from it, as for a package index."""
    folder = tmp_path_factory.mktemp("distributions")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "made")]
    source = copy_sources(folder / "source")
    result = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False, env=clean_environment())
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted((folder / "made").iterdir())


@pytest.mark.slow
def test_an_index_would_take_the_distributions(distributions: list[Path]) -> None:
    version = f"mlsm_plugin-{__version__}"
    assert [path.name for path in distributions] == [f"{version}-py3-none-any.whl", f"{version}.tar.gz"]
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions)]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_a_source_distribution_leaves_fairseq_to_an_extra(distributions: list[Path]) -> None:
    requirements = metadata_of(distributions[0]).get_all("Requires-Dist")
    named = [text for text in requirements if text.startswith(("fairseq", "spams"))]
    assert named == [f'{FAIRSEQ} and extra == "fairseq"', 'spams-bin>=2.6; extra == "fairseq"']
    assert "torch>=2.6" in requirements


@pytest.mark.slow
def test_the_command_of_an_installed_wheel_runs(distributions: list[Path], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python, mlsm = (tmp_path / "env" / "bin" / name for name in ("python", "mlsm"))
    install = [*PIP, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(distributions[0])]
    subprocess.run(install, check=True, env=clean_environment())
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (tmp_path / "text").write_text("one two three four\n" * 50, encoding="utf-8")
    command = [str(mlsm), "tokenizer", "--input", "text", "--vocab-size", "16", "--output", "tokenizer"]
    subprocess.run(command, cwd=tmp_path, check=True, env=clean_environment())
    where = [str(python), "-c", "import mlsm_plugin; print(mlsm_plugin.__file__)"]
    imported = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True, env=clean_environment())
    assert imported.stdout.strip() == str(packages / "mlsm_plugin" / "__init__.py")
    assert (tmp_path / "tokenizer" / "dict.txt").exists()


@pytest.mark.slow
def test_a_build_with_another_python_is_refused_in_one_line(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    project = source / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(re.sub('requires-python = ".*"', 'requires-python = ">=3.90"', text), encoding="utf-8")
    command = [sys.executable, "setup.py", "-q", "egg_info"]
    result = subprocess.run(
        command, cwd=source, capture_output=True, text=True, check=False, env=clean_environment()
    )  # fmt: skip
    python = ".".join(map(str, sys.version_info[:3]))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"mlsm_plugin needs Python >=3.90, and this is Python {python}"


@pytest.mark.slow
def test_doctor_lists_the_requirements_of_a_wheel(installed: Path) -> None:
    environment = {**clean_environment(), "PYTHONPATH": str(installed)}
    command = [sys.executable, "-S", "-m", "mlsm_plugin.cli.main", "doctor"]
    result = subprocess.run(
        command, cwd=installed, capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  ok  ")] == ["Python"]
    assert {"torch", "faiss-cpu"} < {line.split()[1] for line in lines if line.startswith("  --  ")}
    assert "hypothesis" not in result.stdout
    assert lines[-1].endswith(" to fix")
