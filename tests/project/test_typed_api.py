"""A user's type checker reads the public names: mistakes are reported, correct code is not."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PLUGIN, REPOSITORY

USERS_FILE = """\
import torch
from transformers import AutoTokenizer

from mlsm_plugin import huggingface as hf
from mlsm_plugin.core.losses import latent_semantic_kl
from mlsm_plugin.retrieval import PhraseDatastore
from mlsm_plugin.huggingface import Nonsense  # error: attr-defined
from mlsm_plugin.core.losses import no_loss  # error: attr-defined

hf.adapt(3)  # error: arg-type
hf.MaskedLmModel.from_pretrained("model").eval()
model = hf.LatentSemanticModel.from_pretrained("model", num_atoms="many")  # error: arg-type
rows: int = model.latent_head.weight.size(0)
hf.write_text_sequences(["train.txt"], "model", "ids", length=3)  # error: call-arg
loss: torch.Tensor = latent_semantic_kl(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 1))
loss = PhraseDatastore("folder")  # error: assignment
collator = hf.MaskedLmCollator(AutoTokenizer.from_pretrained("model"))
"""


@pytest.mark.slow
def test_mypy_reports_the_mistakes_in_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "users_file.py").write_text(USERS_FILE)
    # in this folder and with its settings, so that the cache of `make lint` saves two minutes
    command = [sys.executable, "-m", "mypy", str(tmp_path / "users_file.py")]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    reported = re.findall(r"users_file\.py:(\d+): error: .*\[([a-z-]+)\]", result.stdout)
    expected = [
        (str(number), line.partition("# error: ")[2])
        for number, line in enumerate(USERS_FILE.splitlines(), 1)
        if "# error: " in line
    ]
    assert reported == expected, result.stdout + result.stderr


@pytest.mark.parametrize("package", ["huggingface", "hub", "retrieval", "core.losses"])
def test_every_public_name_is_there_and_type_checkers_see_it(package: str) -> None:
    module = importlib.import_module(f"mlsm_plugin.{package}")
    tree = ast.parse((PLUGIN / package.replace(".", "/") / "__init__.py").read_text())
    imported = [name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names]
    visible = {name.asname or name.name for name in imported} | {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    assert set(module.__all__) <= visible
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(module.__all__) <= set(dir(module)) | {"PhraseDatastore"}
