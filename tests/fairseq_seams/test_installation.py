from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlsm_plugin.cli import main as cli
from mlsm_plugin.cli.main import main
from mlsm_plugin.fairseq_seams import installation
from tests.conftest import REPOSITORY, failing_mlsm

GOOD = {
    "fairseq-fixed": "0.12.3.1",
    "torch": "2.13.0+cpu",
    "numpy": "2.5.5",
    "scipy": "1.15.1",
    "sentencepiece": "0.2.1",
    "spams-bin": "2.6.14",
    "numba": "0.61.0",
    "tqdm": "4.67.1",
    "packaging": "24.2",
    "omegaconf": "2.3.0",
}
SECOND_LANE = {**GOOD, "fairseq-fixed": None, "fairseq": "0.12.2", "numpy": "1.23.5", "omegaconf": "2.0.6"}


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """A function that lets exactly these distributions be installed, and Python have this version."""

    def install(versions, python=(3, 12, 1)):
        for name, version in versions.items():
            if version is not None:
                folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
                folder.mkdir()
                (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        others = [entry for entry in sys.path if not any(Path(entry or ".").glob("*.dist-info"))]
        monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
        monkeypatch.setattr(installation, "sys", SimpleNamespace(version_info=python))

    return install


def test_this_installation_is_fine(capsys):
    assert installation.first_problem() is None
    installation.require_supported_installation()
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("  ok  ") for line in lines[:-1])
    components = [line.split()[1] for line in lines[:-1]]
    assert components[0] == "Python"
    assert set(GOOD) | {"faiss-cpu", "matplotlib", "transformers", "device"} < set(components)
    assert len(components) == len(set(components))
    assert lines[-1] == f"{installation.lane()}: everything is fine"


def test_doctor_says_what_a_missing_numba_costs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "numba"]
    assert line.startswith(" BAD  numba")
    assert "coding is several times slower; fix: pip install -c constraints.txt --force-reinstall numba" in line


@pytest.mark.parametrize(
    ("python", "versions", "lane"),
    [
        ((3, 12, 1), GOOD, "main lane (Python 3.12, fairseq-fixed 0.12.3)"),
        ((3, 11, 0), {**GOOD, "numpy": "2.2.6"}, "main lane (Python 3.11, fairseq-fixed 0.12.3)"),
        ((3, 10, 9), SECOND_LANE, "second lane (Python 3.10, fairseq 0.12.2)"),
    ],
)
def test_supported_lanes_have_no_problem(pretend, python, versions, lane):
    pretend(versions, python)
    assert installation.first_problem() is None
    assert installation.lane() == lane


CONSTRAINED = "pip install -c constraints.txt"
FIXED, ORIGINAL = f"{CONSTRAINED} 'fairseq-fixed>=0.12.3'", f"{CONSTRAINED} fairseq==0.12.2"
BOTH = "both fairseq and fairseq-fixed are installed and overwrite each other"
BAD = [
    (
        {**GOOD, "fairseq": "0.12.2"}, (3, 12, 1),
        f"fairseq 0.12.2 and fairseq-fixed 0.12.3.1: {BOTH}; fix: pip uninstall fairseq fairseq-fixed; {FIXED}",
    ),
    (
        {**SECOND_LANE, "fairseq-fixed": "0.12.3.1"}, (3, 10, 9),
        f"fairseq 0.12.2 and fairseq-fixed 0.12.3.1: {BOTH}; fix: pip uninstall fairseq fairseq-fixed; {ORIGINAL}",
    ),
    (GOOD, (3, 13, 0), "Python 3.13.0: not supported; use Python 3.12, 3.11 or 3.10"),
    (SECOND_LANE, (3, 9, 2), "Python 3.9.2: not supported; use Python 3.12, 3.11 or 3.10"),
    ({}, (3, 13, 0), "Python 3.13.0: not supported; use Python 3.12, 3.11 or 3.10"),
    (
        {**SECOND_LANE, "numpy": "1.24.0"}, (3, 10, 9),
        "numpy 1.24.0: the original fairseq uses np.float; fix: pip install 'numpy<1.24'",
    ),
    (
        {**SECOND_LANE, "numpy": "1.20.3"}, (3, 10, 9),
        f"numpy 1.20.3: numpy>=1.21 is needed; fix: {CONSTRAINED} 'numpy>=1.21'",
    ),
    (
        {**GOOD, "fairseq-fixed": None, "fairseq": "0.12.2"}, (3, 11, 0),
        "fairseq 0.12.2: the original fairseq does not import on Python 3.11 and newer; "
        f"fix: pip uninstall fairseq; {FIXED}",
    ),
    (
        {**SECOND_LANE, "fairseq": "0.10.2"}, (3, 10, 9),
        f"fairseq 0.10.2: fairseq==0.12.2 is needed; fix: {ORIGINAL}",
    ),
    (
        {**GOOD, "fairseq-fixed": "0.12.2"}, (3, 12, 1),
        f"fairseq-fixed 0.12.2: fairseq-fixed>=0.12.3 is needed; fix: {FIXED}",
    ),
    ({**GOOD, "fairseq-fixed": None}, (3, 12, 1), f"fairseq-fixed missing: fix: {FIXED}"),
    ({**SECOND_LANE, "fairseq": None}, (3, 10, 9), f"fairseq missing: fix: {ORIGINAL}"),
    ({**GOOD, "spams-bin": None}, (3, 12, 1), f"spams-bin missing: fix: {CONSTRAINED} 'spams-bin>=2.6'"),
    ({**GOOD, "torch": "2.0.1"}, (3, 12, 1), f"torch 2.0.1: torch>=2.6 is needed; fix: {CONSTRAINED} 'torch>=2.6'"),
    (
        {**GOOD, "torch": "built by hand"}, (3, 12, 1),
        f"torch built by hand: torch>=2.6 is needed; fix: {CONSTRAINED} 'torch>=2.6'",
    ),
    ({**GOOD, "torch": None}, (3, 12, 1), f"torch missing: fix: {CONSTRAINED} 'torch>=2.6'"),
    ({**GOOD, "tqdm": None}, (3, 12, 1), f"tqdm missing: fix: {CONSTRAINED} tqdm"),
    ({**GOOD, "omegaconf": None}, (3, 12, 1), f"omegaconf missing: fix: {CONSTRAINED} omegaconf"),
    (
        {**GOOD, "omegaconf": "2.0.6"}, (3, 12, 1),
        "omegaconf 2.0.6: fairseq-fixed needs 2.3; fix: pip install omegaconf==2.3.0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("versions", "python", "problem"), BAD)
def test_a_bad_installation_is_one_line_with_its_fix(pretend, capsys, versions, python, problem):
    pretend(versions, python)
    assert installation.first_problem() == problem
    with pytest.raises(ImportError) as error:
        installation.require_supported_installation()
    assert str(error.value) == f"mlsm_plugin cannot run here: {problem} (`mlsm doctor` lists everything)"

    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    bad = [line for line in lines if line.startswith(" BAD  ")]
    assert len(bad) == 1
    assert bad[0].endswith(problem.split(": ", maxsplit=1)[1])
    assert lines[-1].endswith(": 1 to fix")
    if problem.startswith("Python"):  # nothing else helps
        assert len(lines) == 2


def test_a_missing_numba_is_reported_and_stops_nothing(pretend, capsys):
    pretend({**GOOD, "numba": None})
    assert installation.first_problem() is None
    assert main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" BAD  ")]
    words = "numba missing coding is several times slower; fix: pip install -c constraints.txt 'numba>=0.58'"
    assert " ".join(line.split()[1:]) == words


def test_prereleases_are_accepted(pretend):
    pretend({**GOOD, "torch": "2.14.0a0+git1a2b3c", "numba": "0.62.0rc1"})
    assert not any(finding.problem for finding in installation.check_installation())


def test_fairseq_fixed_is_accepted_on_the_second_lane_too(pretend):
    pretend({**GOOD, "numpy": "2.2.6"}, (3, 10, 9))
    assert installation.first_problem() is None


def test_missing_extras_are_notes(pretend, capsys):
    pretend({**GOOD, "tqdm": None, "faiss-gpu": "1.10.0", "matplotlib": "3.6.0", "safetensors": "0.4.5"})
    findings = {finding.component: finding for finding in installation.check_extras()}
    assert list(findings) == ["faiss-cpu", "matplotlib", "transformers", "accelerate", "safetensors", "protobuf"]
    assert not any(finding.problem for finding in findings.values())
    assert findings["faiss-cpu"] == installation.Finding("faiss-cpu", "1.10.0")
    assert findings["safetensors"].note is None
    old = f"optional, for mlsm_plugin[plot]; matplotlib>=3.7 is needed; fix: {CONSTRAINED} 'matplotlib>=3.7'"
    assert findings["matplotlib"].note == old
    missing = f"optional, for mlsm_plugin[hf]; fix: {CONSTRAINED} protobuf"
    assert findings["protobuf"] == installation.Finding("protobuf", "missing", note=missing)
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  --  ")] == [
        "matplotlib",
        "transformers",
        "accelerate",
        "protobuf",
    ]
    assert lines[-1].endswith(": 1 to fix")


def test_a_project_file_of_something_else_is_not_read(monkeypatch, tmp_path):
    other = tmp_path / "pyproject.toml"
    other.write_text('[project]\nname = "other"\nrequires-python = ">=3.99"\ndependencies = []\n')
    monkeypatch.setattr(installation, "PROJECT_FILE", other)
    assert installation._declared_by_project_file() is None
    asked = installation.declared()
    assert asked is None or "3.99" not in asked.python


def test_spams_under_its_other_name_is_found(pretend):
    pretend({**GOOD, "spams-bin": None, "spams": "2.6.5.4"})
    assert installation.first_problem() is None


@pytest.mark.parametrize("command", sorted({*cli.COMMANDS} - {"doctor", *installation.WITHOUT_FAIRSEQ}))
def test_every_other_command_stops_with_the_problem(monkeypatch, pretend, capsys, command):
    pretend({**GOOD, "spams-bin": None})

    def must_not_run(command):
        raise AssertionError("the command must not be imported")

    monkeypatch.setattr(cli, "build_parser", must_not_run)
    expected = f"mlsm: error: spams-bin missing: fix: {CONSTRAINED} 'spams-bin>=2.6' (`mlsm doctor` lists everything)"
    assert failing_mlsm(capsys, command, "anything") == expected


@pytest.mark.parametrize("command", installation.WITHOUT_FAIRSEQ)
def test_some_commands_stop_only_without_what_they_need(monkeypatch, pretend, capsys, command):
    without = {**GOOD, "fairseq-fixed": None, "omegaconf": None, "sentencepiece": None, "spams-bin": None}
    pretend(without)
    assert installation.first_problem(without_fairseq=True) is None
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(": 4 to fix")
    working = ", ".join(f"mlsm {name}" for name in installation.WITHOUT_FAIRSEQ)
    assert lines[-2] == f"what needs no fairseq works: {working}"
    monkeypatch.setattr(installation, "CONSEQUENCES", {})
    expected = f"mlsm: error: numba 0.1: numba>=0.58 is needed; fix: {CONSTRAINED} 'numba>=0.58' (`mlsm doctor` lists"
    monkeypatch.setattr(installation, "installed_version", lambda *names: {**without, "numba": "0.1"}.get(names[0]))
    assert failing_mlsm(capsys, command, "anything") == f"{expected} everything)"


def test_help_and_version_work_in_a_bad_installation(pretend, capsys):
    pretend({})
    for flag in ("--help", "--version"):
        with pytest.raises(SystemExit) as end:
            main([flag])
        assert end.value.code == 0
    assert "mlsm_plugin" in capsys.readouterr().out


BROKEN = """
import sys
from importlib import metadata
real = metadata.version
def version(name):
    if name in ("spams", "spams-bin"):
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
"""


@pytest.mark.parametrize("python", [(3, 12, 1), (3, 13, 0)])
def test_without_packaging_there_is_one_line(python):
    code = "import sys\nsys.modules['packaging'] = None\nfrom types import SimpleNamespace\n"
    code += "from mlsm_plugin.fairseq_seams import installation\n"
    code += f"installation.sys = SimpleNamespace(version_info={python})\nprint(installation.first_problem())\n"
    code += "assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )  # fmt: skip
    missing = "packaging missing: nothing else can be checked; fix: pip install -c constraints.txt packaging"
    refused = "Python 3.13.0: not supported; use Python 3.12, 3.11 or 3.10"
    assert result.stdout == (missing if python == (3, 12, 1) else refused) + "\n"


@pytest.mark.slow
def test_importing_the_plugin_into_fairseq_says_what_is_missing():
    code = BROKEN + "import fairseq\nimport mlsm_plugin\n"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: mlsm_plugin cannot run here: spams-bin missing: fix: pip install")


def test_a_command_in_a_bad_installation_is_one_line_without_fairseq():
    code = BROKEN + "from mlsm_plugin.cli.main import main\nstatus = main(['encode', 'x'])\n"
    code += "assert 'fairseq' not in sys.modules\nsys.exit(status)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("mlsm: error: spams-bin missing: fix: pip install")
