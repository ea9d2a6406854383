"""What fairseq does not promise to keep is reached through compat only, and is still there."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from mlsm_plugin.fairseq_plugin import compat
from tests.conftest import PLUGIN
from tests.fairseq_plugin.compat.compat_checks import CHECKS, CompatCheck

MODULES = sorted(
    path.stem for path in (PLUGIN / "fairseq_plugin" / "compat").glob("*.py") if path.name != "__init__.py"
)
OUTSIDE = [path for path in sorted(PLUGIN.rglob("*.py")) if path.parent.name != "compat"]
# attributes with a leading underscore that are used outside, and why
ALLOWED = {
    ("cli/actions.py", "super()._get_help_string"): "of argparse: its own help formatters differ in this method only",
    ("cli/actions.py", "argparse._SubParsersAction"): "a type that has no public name",
    ("cli/settings_flags.py", "argparse._ActionsContainer"): "a type that has no public name",
    ("huggingface/training.py", "trainer._load_from_checkpoint"): "the public way to a checkpoint makes an update more",
}
# parts of fairseq that have no underscore and are reached through compat only: attributes, and what strings hold
ATTRIBUTES = {
    *("defn", "slice_indices", "sentence_encoder", "lm_head", "embed_tokens", "embed_positions", "layernorm_embedding"),
    *("classification_heads", "load_checkpoint_to_cpu", "load_model_ensemble_and_task"),
}
KEYS = ("sentence_encoder", "embed_tokens", "encoder_out", "encoder_states", "optimizer_history", "net_input.")
METHODS = (FunctionType, classmethod, staticmethod, property)
every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.module}: {check.needs}")


@every_check
def test_fairseq_has_what_compat_needs(check: CompatCheck) -> None:
    problem = check.problem()
    assert problem is None, problem


@every_check
def test_a_change_of_fairseq_is_reported_with_the_name_of_the_module(
    check: CompatCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        check.change(patch)
        problem = check.problem()
    assert problem is not None
    place = f"mlsm_plugin/fairseq_plugin/compat/{check.module}.py"
    assert problem.startswith(f"{place} relies on something that has changed: {check.needs} (")


def test_every_module_has_a_check_and_a_line() -> None:
    assert sorted({check.module for check in CHECKS}) == MODULES
    listed = re.findall(r"^- ``(\w+)``: .+", compat.__doc__ or "", re.MULTILINE)
    assert listed == MODULES


def defined_in(tree: ast.AST) -> set[str]:
    """Names of the functions of a file, and of the attributes that its classes declare or set on themselves."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@cache
def defined_outside() -> frozenset[str]:
    """What the files outside of compat define: a class may use what its base in another file has."""
    return frozenset().union(*(defined_in(ast.parse(path.read_text(encoding="utf-8"))) for path in OUTSIDE))


# public parts of every typing.NamedTuple
OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")


def private_of_others(source: str) -> list[str]:
    """What a file uses that has a leading underscore and is not its own: attributes, imported names, getattr."""
    tree = ast.parse(source)
    own = defined_in(tree) | defined_outside()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr) and node.attr not in OF_NAMED_TUPLES:
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not (of_itself and node.attr in own):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{name.name}" for name in node.names if re.match(r"_(?!_)", name.name)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and re.match(r"_(?!_)", str(name.value)):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.relative_to(PLUGIN).as_posix())
def test_private_things_of_others_are_used_in_compat_only(path: Path) -> None:
    name = path.relative_to(PLUGIN).as_posix()
    found = {(name, expression) for expression in private_of_others(path.read_text(encoding="utf-8"))}
    assert found == {allowed for allowed in ALLOWED if allowed[0] == name}


def parts_of_fairseq(source: str) -> list[str]:
    """Parts of fairseq that a file reaches by itself; what ``self`` has, and functions of compat, are no such parts."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            of_compat = isinstance(node.value, ast.Name) and node.value.id in ("self", *MODULES)
            found += [] if of_compat else [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            found += [node.value for key in KEYS if key in node.value]
    return found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.relative_to(PLUGIN).as_posix())
def test_parts_of_fairseq_are_reached_through_compat_only(path: Path) -> None:
    assert parts_of_fairseq(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("model.encoder.lm_head.weight", ["model.encoder.lm_head"]),
        ("model_parts.lm_head(model), self.lm_head", []),
        ("state['optimizer_history'][-1]", ["optimizer_history"]),
        ('"""Of the optimizer_history."""', []),
    ],
)
def test_what_counts_as_a_part_of_fairseq(source: str, expected: list[str]) -> None:
    assert parts_of_fairseq(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("parser._actions", ["parser._actions"]),
        ("self._data_file.write(b'')", ["self._data_file"]),
        ("from fairseq.data import _flatten", ["fairseq.data._flatten"]),
        ("getattr(index, '_file')", ["getattr(index, '_file')"]),
        ("class A:\n    def f(self):\n        self._x = 1\n        return self._x + self.__class__.y", []),
        ("class A:\n    _x: int\n    @classmethod\n    def _f(cls):\n        return cls._f, cls._x", []),
    ],
)
def test_what_counts_as_private(source: str, expected: list[str]) -> None:
    assert private_of_others(source) == expected


def classes_of(path: Path) -> list[type[Any]]:
    parts = path.relative_to(PLUGIN.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    module = importlib.import_module(name)
    return [found for found in vars(module).values() if isinstance(found, type) and found.__module__ == name]


def test_no_class_outside_replaces_a_private_method_of_fairseq() -> None:
    replaced = []
    for path in OUTSIDE:
        for found in classes_of(path):
            others = [base for base in found.__mro__ if base.__module__.split(".")[0] in ("fairseq", "torch")]
            methods = [name for name, value in vars(found).items() if isinstance(value, METHODS)]
            private = [name for name in methods if re.match(r"_(?!_)", name)]
            replaced += [f"{found.__qualname__}.{name}" for name in private for base in others if name in vars(base)]
    assert replaced == []
