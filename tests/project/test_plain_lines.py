"""Each line of the package is plain: no literals or generators unpacked, no nested conditions, few untyped values."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PLUGIN, REPOSITORY

# folders of mlsm_plugin/ that are checked
FOLDERS = (".",)
# uses of typing.Any in these folders together: untyped objects of fairseq and transformers, and JSON
MOST_ANY = 350
LITERALS = (ast.Tuple, ast.List, ast.Set)
COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
NO_NAMES = {"found", "own", "one"}  # participles and pronouns
Fault = tuple[int, str]


def checked_files() -> list[Path]:
    """The modules of the checked folders."""
    files: list[Path] = []
    for folder in FOLDERS:
        files.extend(sorted((PLUGIN / folder).rglob("*.py")))
    return files


def faults(source: str) -> list[Fault]:
    """Line and description of everything in a module's source that is not plain, in order."""
    result: list[Fault] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            result.extend(_faults_of_call(node))
        elif isinstance(node, ast.Assign):
            result.extend(_faults_of_assignment(node))
        elif isinstance(node, LITERALS):
            for element in node.elts:
                if isinstance(element, ast.Starred) and isinstance(element.value, LITERALS):
                    result.append((element.lineno, "a literal unpacked in another one: write its elements"))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NO_NAMES:
            result.append((node.lineno, f"{node.id} is no name: name the thing"))
        elif isinstance(node, ast.arg) and node.arg in NO_NAMES:
            result.append((node.lineno, f"{node.arg} is no name: name the thing"))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp):
            result.append((node.lineno, "a conditional expression as a statement: write if and else"))
        elif isinstance(node, ast.IfExp) and _has_nested_condition(node):
            result.append((node.lineno, "nested conditional expressions: write if statements"))
    result.extend(_format_skips(source))
    return sorted(result)


def _faults_of_call(call: ast.Call) -> Iterator[Fault]:
    for argument in call.args:
        if isinstance(argument, ast.Starred) and isinstance(argument.value, LITERALS):
            yield argument.lineno, "a literal unpacked into arguments: pass them one by one"
    for keyword in call.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            yield keyword.lineno, "a dict literal unpacked into arguments: pass them by name"


def _faults_of_assignment(statement: ast.Assign) -> Iterator[Fault]:
    targets = [target for target in statement.targets if isinstance(target, ast.Tuple | ast.List)]
    if not targets:
        return
    if isinstance(statement.value, COMPREHENSIONS):
        yield statement.lineno, "a comprehension unpacked into names: write an assignment for each"
    if isinstance(statement.value, LITERALS):
        values = sorted(ast.unparse(value) for value in statement.value.elts)
        if any(sorted(ast.unparse(name) for name in target.elts) != values for target in targets):
            yield statement.lineno, "several values assigned at once: write an assignment for each"


def _has_nested_condition(condition: ast.IfExp) -> bool:
    return any(isinstance(node, ast.IfExp) for node in ast.walk(condition) if node is not condition)


def _format_skips(source: str) -> Iterator[Fault]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and "fmt: skip" in token.string:
            yield token.start[0], "fmt: skip: let the formatter lay the line out"


def uses_of_any(source: str) -> int:
    """How often a module's source refers to ``typing.Any``, its import aside."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        name = isinstance(node, ast.Name) and node.id == "Any"
        attribute = isinstance(node, ast.Attribute) and ast.unparse(node) == "typing.Any"
        count += name or attribute
    return count


def test_every_line_is_plain() -> None:
    messages = []
    for path in checked_files():
        for line, fault in faults(path.read_text(encoding="utf-8")):
            messages.append(f"{path.relative_to(REPOSITORY)}:{line}: {fault}")
    assert not messages, "\n" + "\n".join(messages)


def test_few_values_are_untyped() -> None:
    counts = {path: uses_of_any(path.read_text(encoding="utf-8")) for path in checked_files()}
    most = sorted(counts, key=lambda path: -counts[path])[:10]
    listing = ", ".join(f"{path.relative_to(REPOSITORY)} {counts[path]}" for path in most)
    assert sum(counts.values()) <= MOST_ANY, f"{sum(counts.values())} uses of Any; most in {listing}"


@pytest.mark.parametrize(
    "source",
    [
        "f(*(a, b), c=1)",
        "f(*['--x', '1'])",
        "f(**{'a': 1})",
        "a, b = (f(x) for x in y)",
        "[a, b] = [f(x) for x in y]",
        "a, b = x, y",
        "a, b = a, c",
        "a.x, b = (1, 2)",
        "f() if a else g()",
        "x = 1 if a else 2 if b else 3",
        "x = f(1 if a else 2) if b else 3",
        "x = 1  # fmt: skip",
        "x = [*(a, b), c]",
        "found = f()",
        "for own in x: pass",
        "def f(one): pass",
    ],
)
def test_lines_that_are_not_plain(source: str) -> None:
    assert [line for line, _ in faults(f"\n{source}\n")] == [2]


@pytest.mark.parametrize(
    "source",
    [
        "left, right = right, left",
        "a.x, b.x = b.x, a.x",
        "loss, size = f(x)",
        "rows, width = x.shape",
        "f(*paths, **options)",
        "for a, b in zip(x, y): pass",
        "x = (1 if a else 2, 1 if b else 2)",
        "'# fmt: skip'",
    ],
)
def test_lines_that_are_plain(source: str) -> None:
    assert faults(source) == []


def test_uses_of_any_are_counted() -> None:
    source = "from typing import Any\nimport typing\ndef f(x: Any) -> dict[str, typing.Any]: ...\n"
    assert uses_of_any(source) == 2
