"""docs/security.md lists every place where fairseq evaluates, imports or unpickles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fairseq

from tests.conftest import REPOSITORY

FAIRSEQ = Path(fairseq.__file__).parent
FUNCTIONS = {"eval", "exec", "globals", "__import__"}
METHODS = {"import_module", "eval_str_list", "eval_str_dict", "eval_bool"}
OF_MODULES = {
    *("pickle.load", "pickle.loads", "torch.load", "yaml.load", "np.load", "os.system"),
    *("subprocess.call", "subprocess.check_output", "subprocess.Popen", "subprocess.run"),
}


def calls(source: str) -> Iterator[str]:
    """The functions that a file calls and that can run something."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS | METHODS:
            yield node.func.id
        elif isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if node.func.attr in METHODS:
                yield node.func.attr
            elif f"{owner}.{node.func.attr}" in OF_MODULES:
                yield f"{owner}.{node.func.attr}"


def listed() -> dict[str, set[str]]:
    """The calls by file that the table has."""
    text = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
    table: dict[str, set[str]] = {}
    for line in text[text.index("| file of fairseq |") :].splitlines()[2:]:
        files, names, _ = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|"))
        for file in files:
            table[file] = set(names)
    return table


def test_every_call_is_listed() -> None:
    table = listed()
    assert set().union(*table.values()) <= FUNCTIONS | METHODS | OF_MODULES
    for folder, prefix in ((FAIRSEQ, ""), (FAIRSEQ.parent / "fairseq_cli", "fairseq_cli/")):
        for path in sorted(folder.rglob("*.py")):
            name = prefix + path.relative_to(folder).as_posix()
            if not name.startswith("examples/") and (found := set(calls(path.read_text(encoding="utf-8")))):
                assert found <= table.get(name, set()), name


def test_a_call_is_found() -> None:
    source = "import os\nos.system(x)\nutils.eval_bool(eval(y))\nmodel.eval()\ntorch.load(f)"
    assert sorted(calls(source)) == ["eval", "eval_bool", "os.system", "torch.load"]
