"""The site of `make docs`: a page for each command with all of its options; what must not be published fails."""

from __future__ import annotations

import argparse
import inspect
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mlsm_plugin.cli.main import COMMANDS, build_parser
from tests.conftest import REPOSITORY

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What docs/reference_pages.py defines."""
    return runpy.run_path(str(DOCS / "reference_pages.py"))


@pytest.fixture(scope="module")
def pages(reference: dict[str, Any]) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "NO_COLOR"):  # which the function sets
            patch.setenv(name, "")
        return dict(reference["reference_pages"]())


def parsers_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers_below(below)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_has_every_option_of_the_command_and_its_actions(command: str, pages: dict[str, str]) -> None:
    (commands,) = [a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction)]
    page = pages[f"mlsm-{command}"]
    sections = re.split(r"^\.\. program:: (.+)$", page, flags=re.M)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    for parser in parsers_below(commands.choices[command]):
        documented = re.findall(r"^\.\. option:: (.+)$", found.pop(parser.prog), flags=re.M)
        flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
        assert flags == {flag for line in documented for flag in re.findall(r"(?<!\S)--?[a-z][\w-]*", line)}
    assert not found


def test_text_of_a_parser_is_no_markup(reference: dict[str, Any]) -> None:
    assert reference["plain"]("a*b |c| `d_e`f g_ \\h") == r"a\*b \|c\| \ ``d_e``\ f g\_ \\h"


def test_fields_have_their_comments_and_helps(reference: dict[str, Any]) -> None:
    code = """
class A:
    x: int  # in nats
    y: int = option(1, help="how " "many")
    z: int = 2  # noqa: X
    least: int = option(1, help=f"at least {LEAST}")
"""
    texts = dict(reference["texts_of_fields"](code, {"LEAST": 3}))
    assert texts == {("A", "x"): "in nats", ("A", "y"): "how many", ("A", "least"): "at least 3"}


def test_the_site_reads_the_fields_of_every_module_of_the_api(reference: dict[str, Any]) -> None:
    texts: dict[tuple[str, str], str] = {}
    for names in reference["MODULES"].values():
        for module in map(import_module, names):
            texts.update(reference["texts_of_fields"](inspect.getsource(module), vars(module)))
    assert len(texts) > 50
    assert all(isinstance(text, str) for text in texts.values())


def test_the_api_names_modules_once(reference: dict[str, Any]) -> None:
    modules = [name for names in reference["MODULES"].values() for name in names]
    assert len(set(modules)) == len(modules) > 20
    for name in modules:
        path = REPOSITORY / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), name


# ---- strict: small sites ----

PAGE = "# A page\n\n[link](docs/README.md#a-heading)\n"
SOUND = """'A module.'\n\nfrom pathlib import Path\n\ndef sound():\n    'See :func:`sound` and :class:`Path`.'\n"""
FAULTS = {  # file: its text, and what must be said of it
    "docs/more.md": ("# More\n\n[a](missing.md) [b](README.md#no-heading)\n", ("missing.md", "no-heading")),
    "mlsm_plugin_own.py": (
        SOUND.replace("`Path`", "`Pahth`") + "\n\ndef bare():\n    pass\n",
        ("reference target not found: Pahth", "mlsm_plugin_own.bare has no docstring"),
    ),
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The sources of a small site; conf.py is ours, and there are fewer modules."""
    for name in ("docs/more.md", "examples/one/README.md", "research/README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# Title\n\ntext\n", encoding="utf-8")
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    rows = "| [commands.md](commands.md) | a |\n| [more.md](more.md) | b |\n"
    (tmp_path / "docs" / "README.md").write_text(f"# Docs\n\n## A heading\n\n| a | b |\n| --- | --- |\n{rows}", "utf-8")
    (tmp_path / "docs" / "commands.md").write_text("# Commands\n\n| `mlsm plot` | a |\n", encoding="utf-8")
    for name in ("site.css", "conf.py"):
        shutil.copy(DOCS / name, tmp_path / "docs")
    (tmp_path / "report.html").write_text("a report", encoding="utf-8")
    reference = (DOCS / "reference_pages.py").read_text(encoding="utf-8")
    reference, count = re.subn(
        r"^API = \{.*?^\}", 'API = {"Losses": "core.losses: zero_gradients"}', reference, flags=re.M | re.S
    )
    assert count == 1
    (tmp_path / "docs" / "reference_pages.py").write_text(reference, encoding="utf-8")
    (tmp_path / "examples" / "one" / "README.md").write_text(
        "# One\n\n```{eval-rst}\n.. automodule:: mlsm_plugin_own\n```\n", encoding="utf-8"
    )
    (tmp_path / "mlsm_plugin_own.py").write_text(SOUND, encoding="utf-8")
    return tmp_path


def build(site: Path) -> subprocess.CompletedProcess[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (options,) = re.findall(r"bin/sphinx-build (.*)", makefile)
    words = [sys.executable, "-m", "sphinx", *options.split()]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{REPOSITORY}:{site}", "REPORT": "report.html"}
    return subprocess.run(words, cwd=site, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_sound_site_is_built_and_faults_are_named(site: Path) -> None:
    result = build(site)
    assert (result.returncode, result.stderr) == (0, "")
    built = site / "build" / "docs"
    commands = (built / "docs" / "commands.html").read_text(encoding="utf-8")
    assert 'href="reference/mlsm-plot.html"' in commands
    assert 'id="cmdoption-mlsm-plot-dpi"' in (built / "docs/reference/mlsm-plot.html").read_text(encoding="utf-8")
    for name, (text, _) in FAULTS.items():
        (site / name).write_text(text, encoding="utf-8")
    result = build(site)
    assert result.returncode == 1
    assert all(message in result.stderr for _, messages in FAULTS.values() for message in messages), result.stderr
