"""The installed versions, and what is wrong with them.

The requirements are those that pip reads, written once in ``pyproject.toml``. In a checkout they are read from that
file, elsewhere from the metadata of the installed package. Code checks only what a requirement cannot express: two
fairseqs in one environment, and versions that conflict with the installed fairseq.

This module reads package metadata only, so that it can report problems before an unsupported fairseq is imported.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mlsm_plugin.version import __version__

try:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion
except ImportError:  # check_installation reports it
    PACKAGING = False
else:
    PACKAGING = True

DISTRIBUTION = "mlsm_plugin"
PROJECT_FILE = Path(__file__).resolve().parents[2] / "pyproject.toml"
INSTALL = "pip install -c constraints.txt"

# the tested combinations; a test compares them with requires-python
LANES = {
    (3, 10): "second lane (Python 3.10, fairseq 0.12.2)",
    (3, 11): "main lane (Python 3.11, fairseq-fixed 0.12.3)",
    (3, 12): "main lane (Python 3.12, fairseq-fixed 0.12.3)",
}
FAIRSEQS = ("fairseq-fixed", "fairseq")
# the same modules under other names
ALTERNATIVES = {"spams-bin": ("spams",), "faiss-cpu": ("faiss-gpu", "faiss")}
# requirements that the package can do without, and what their absence costs
CONSEQUENCES = {"numba": "coding is several times slower"}
DEVELOPMENT_EXTRAS = ("test", "dev")
# the subcommands of `mlsm` that work where fairseq is not installed
WITHOUT_FAIRSEQ = ("adapt", "binarize --format sequences", "encode, of sequences", "convert, of dictionaries")
# what only fairseq needs, or what works with fairseq only
WITH_FAIRSEQ = (*FAIRSEQS, "omegaconf", "sentencepiece", "spams-bin")


@dataclass(frozen=True)
class Finding:
    """One line of ``mlsm doctor``: a component, its version, and what is wrong (``problem`` None: nothing is wrong).

    ``note`` holds advice that does not have to be followed.
    """

    component: str
    version: str
    problem: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Declared:
    """The requirements of the package: Python versions, other packages with their markers, and its extras."""

    python: str
    requirements: list[str]
    extras: dict[str, list[str]]


def installed_version(*distributions: str) -> str | None:
    """The version of the first of ``distributions`` that is installed, or None."""
    for name in distributions:
        try:
            version: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version:  # an interrupted installation can leave a folder without a version
            return version
    return None


def lane() -> str:
    """The name of the tested combination that this version of Python belongs to."""
    return LANES.get(sys.version_info[:2], "no tested lane")


def declared() -> Declared | None:
    """The requirements in a checkout's ``pyproject.toml``, else in the installed metadata; None if neither exists."""
    return _declared_by_project_file() or _declared_by_metadata()


def check_installation() -> list[Finding]:
    """Every component that the plugin needs, each with its problem if it has one."""
    asked = declared()
    python = _check_python(asked)
    if python.problem:  # nothing else helps until this is fixed
        return [python]
    if not PACKAGING:
        return [python, Finding("packaging", "missing", f"nothing else can be checked; fix: {INSTALL} packaging")]
    needed = _applying(asked.requirements) if asked else []
    usual = "fairseq-fixed" if sys.version_info >= (3, 11) else "fairseq"
    wanted = next((one for one in needed if one.name in FAIRSEQS), Requirement(usual))
    fairseq = _check_fairseq(wanted)
    findings = {"Python": python, "fairseq": fairseq}
    findings.update({one.name: _check(one) for one in needed if one.name not in FAIRSEQS})
    findings["omegaconf"] = _check_omegaconf(fairseq)
    if wanted.name == fairseq.component == "fairseq":
        findings["numpy"] = _check_numpy_of_original(findings.get("numpy"))
    if asked is None:
        note = f"versions are not checked, since mlsm_plugin is not installed; {INSTALL} -e . in its checkout"
        findings[DISTRIBUTION] = Finding(DISTRIBUTION, __version__, note=note)
    return list(findings.values())


def check_extras() -> list[Finding]:
    """The components that the extras of the package need; a missing one is a note, not a problem."""
    asked = declared()
    if not PACKAGING or asked is None or _check_python(asked).problem:
        return []
    needed = _applying(asked.requirements)
    findings = []
    for extra, requirements in asked.extras.items():
        if extra in DEVELOPMENT_EXTRAS:
            continue
        for requirement in _applying(requirements, extra):
            if requirement not in needed:
                finding = _check(requirement)
                note = f"optional, for mlsm_plugin[{extra}]; {finding.problem}" if finding.problem else None
                findings.append(Finding(finding.component, finding.version, note=note))
    return findings


def first_problem(*, without_fairseq: bool = False) -> str | None:
    """The first problem that keeps the plugin from working, with its fix, in one line; None if there is no problem.

    Args:
        without_fairseq: leave out fairseq and what only fairseq needs.
    """
    for finding in check_installation():
        needed = not without_fairseq or finding.component not in WITH_FAIRSEQ
        if finding.problem and needed and finding.component not in CONSEQUENCES:
            return f"{finding.component} {finding.version}: {finding.problem}"
    return None


def require_supported_installation() -> None:
    """Raise ImportError, with a message of one line, if the installation cannot work."""
    problem = first_problem()
    if problem:
        raise ImportError(f"mlsm_plugin cannot run here: {problem} (`mlsm doctor` lists everything)")


def _declared_by_project_file() -> Declared | None:
    try:
        import tomllib  # Python 3.11

        project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    except (ImportError, OSError, KeyError, ValueError):
        return None
    if project.get("name") != DISTRIBUTION:  # another project's file, next to an installed package
        return None
    return Declared(project["requires-python"], project["dependencies"], project["optional-dependencies"])


def _declared_by_metadata() -> Declared | None:
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    requirements = distribution.requires or []
    extras = distribution.metadata.get_all("Provides-Extra") or []
    return Declared(distribution.metadata["Requires-Python"] or "", requirements, dict.fromkeys(extras, requirements))


def _applying(requirements: list[str], extra: str = "") -> list[Requirement]:
    """The requirements whose markers are true for this Python and ``extra``."""
    version = ".".join(map(str, sys.version_info[:3]))
    environment = {"python_version": version.rpartition(".")[0], "python_full_version": version, "extra": extra}
    parsed = map(Requirement, requirements)
    return [one for one in parsed if one.marker is None or one.marker.evaluate(environment)]


def _satisfies(version: str, specifier: SpecifierSet | str) -> bool:
    try:
        return SpecifierSet(str(specifier)).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _install(requirement: Requirement) -> str:
    return f"{INSTALL} {shlex.quote(f'{requirement.name}{requirement.specifier}')}"


def _check_python(asked: Declared | None) -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    supported = _satisfies(python, asked.python) if PACKAGING and asked else sys.version_info[:2] in LANES
    if supported:
        return Finding("Python", python)
    *others, last = (f"{major}.{minor}" for major, minor in sorted(LANES, reverse=True))
    return Finding("Python", python, f"not supported; use Python {', '.join(others)} or {last}")


def _check(requirement: Requirement) -> Finding:
    version = installed_version(requirement.name, *ALTERNATIVES.get(requirement.name, ()))
    if version and (not requirement.specifier or _satisfies(version, requirement.specifier)):
        return Finding(requirement.name, version)
    reasons = [f"{requirement.name}{requirement.specifier} is needed"] if version else []
    reasons += [CONSEQUENCES[requirement.name]] if requirement.name in CONSEQUENCES else []
    return Finding(requirement.name, version or "missing", "; ".join([*reasons, f"fix: {_install(requirement)}"]))


def _check_fairseq(wanted: Requirement) -> Finding:
    fixed, original = installed_version("fairseq-fixed"), installed_version("fairseq")
    if fixed and original:
        problem = "both fairseq and fairseq-fixed are installed and overwrite each other; "
        fix = f"fix: pip uninstall fairseq fairseq-fixed; {_install(wanted)}"
        return Finding("fairseq", f"{original} and fairseq-fixed {fixed}", problem + fix)
    if original and wanted.name == "fairseq-fixed":
        problem = "the original fairseq does not import on Python 3.11 and newer; "
        return Finding("fairseq", original, f"{problem}fix: pip uninstall fairseq; {_install(wanted)}")
    if fixed and wanted.name == "fairseq":  # it also runs on Python 3.10
        return Finding("fairseq-fixed", fixed)
    return _check(wanted)


def _check_omegaconf(fairseq: Finding) -> Finding:
    """Check omegaconf, whose version depends on which fairseq is installed."""
    version = installed_version("omegaconf")
    if version is None:
        return Finding("omegaconf", "missing", f"fix: {INSTALL} omegaconf")
    if fairseq.component == "fairseq-fixed" and not _satisfies(version, ">=2.3"):
        return Finding("omegaconf", version, "fairseq-fixed needs 2.3; fix: pip install omegaconf==2.3.0")
    return Finding("omegaconf", version)


def _check_numpy_of_original(finding: Finding | None) -> Finding:
    finding = finding or _check(Requirement("numpy"))
    if finding.problem or _satisfies(finding.version, "<1.24"):
        return finding
    return Finding("numpy", finding.version, "the original fairseq uses np.float; fix: pip install 'numpy<1.24'")
