"""Where fairseq is not installed: what imports, which commands work, and what the others say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from transformers import AutoModelForMaskedLM

from mlsm_plugin.fairseq_plugin.compat.installation import WITHOUT_FAIRSEQ
from mlsm_plugin.version import __version__
from tests.conftest import PLUGIN, REPOSITORY
from tests.labelled_files import write_labelled
from tests.tiny_hf_models import make_model

# distributions and modules of fairseq and of what only fairseq needs
HIDDEN = re.compile(
    r"(fairseq|fairseq_cli|fairseq_fixed|hydra|hydra_core|omegaconf|antlr4.*|spams.*|_spams.*|sentencepiece|"
    r"_sentencepiece.*|mlsm_plugin|__editable__.*)(-[^/]*|\.(py|so|pth|libs)|\..*\.so)?"
)
# hides them in a process, also their metadata
BLOCKER = f"""
import importlib.machinery, importlib.metadata, re, sys

HIDDEN = re.compile({HIDDEN.pattern!r})
find = importlib.machinery.PathFinder.find_spec

def find_another(name, path=None, target=None):
    if HIDDEN.fullmatch(name.partition(".")[0]) and name.partition(".")[0] != "mlsm_plugin":
        return None
    return find(name, path, target)

importlib.machinery.PathFinder.find_spec = staticmethod(find_another)
version = importlib.metadata.version

def of_another(name):
    if HIDDEN.fullmatch(name.replace("-", "_").lower()):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.metadata.version = of_another
"""


def run(
    code: str, *, python: Path | str = sys.executable, check: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
    result = subprocess.run([str(python), "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert not check or result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def modules_of(*folders: str) -> list[str]:
    return [
        ".".join(path.relative_to(PLUGIN.parent).with_suffix("").parts).removesuffix(".__init__")
        for folder in folders
        for path in sorted((PLUGIN / folder).rglob("*.py"))
    ]


FREE = (
    *modules_of("core", "huggingface", "search"),
    "mlsm_plugin.evaluation.encoder_quality",
    "mlsm_plugin.evaluation.finetuning",
    "mlsm_plugin.evaluation.labelled_texts",
    "mlsm_plugin.evaluation.sentence_encoders",
    "mlsm_plugin.evaluation.training_epochs",
    *(
        f"mlsm_plugin.cli.{name}"
        for name in ("main", "adapt", "binarize", "convert", "doctor", "encode", "evaluate", "finetune", "search")
    ),
)


@pytest.mark.slow
def test_these_modules_import_without_fairseq() -> None:
    code = f"""{BLOCKER}
import importlib
import mlsm_plugin
for name in {FREE!r}:
    importlib.import_module(name)
there = [name for name in sys.modules if HIDDEN.fullmatch(name.partition(".")[0]) and "mlsm_plugin" not in name]
assert not there, there
print(len({FREE!r}), mlsm_plugin.__version__)
"""
    assert int(run(code).stdout.split()[0]) == len(FREE) > 60


def test_a_module_that_is_none_counts_as_missing() -> None:
    code = "sys.modules['fairseq'] = None\nimport mlsm_plugin\nprint(mlsm_plugin.__version__)"
    assert run(BLOCKER + code).stdout.strip() == __version__


def environment_without_fairseq(folder: Path) -> Path:
    """An environment with links to all packages of this one, except fairseq and what only fairseq needs.

    Returns:
        its interpreter.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    for kind in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(kind)).iterdir():
            if not HIDDEN.fullmatch(path.name) and not (own / path.name).exists():
                (own / path.name).symlink_to(path)
    for name in ("fairseq", "hydra", "omegaconf", "spams", "sentencepiece"):
        assert run(f"import {name}", python=python, check=False).returncode, name
    return python


class Done(NamedTuple):
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str


END = "--- the command ended with "


def mlsm(python: Path, *commands: Sequence[object]) -> list[Done]:
    """Run commands one after the other in one process, whose start takes seconds."""
    words = [[str(word) for word in command] for command in commands]
    code = f"""
import sys
from mlsm_plugin.cli.main import main
for words in {words!r}:
    status = main(words)
    for stream in (sys.stdout, sys.stderr):
        print({END!r} + str(status), file=stream, flush=True)
"""
    result = run(code, python=python)
    pattern = rf"(.*?)^{END}(\d+)$\n"
    printed, errors = (re.findall(pattern, text, flags=re.M | re.S) for text in (result.stdout, result.stderr))
    assert len(printed) == len(errors) == len(commands)
    return [Done(int(status), output, error) for (output, status), (error, _) in zip(printed, errors, strict=True)]


@pytest.mark.slow
def test_from_text_to_codes_without_fairseq(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    python = environment_without_fairseq(tmp_path / "environment")
    model = make_model("bert", english_text[1], tmp_path / "bert")
    np.save(tmp_path / "atoms.npy", np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32))
    small = ("--threads", 1, "--device", "cpu")
    convert = (
        *("convert", tmp_path / "atoms.npy", tmp_path / "dictionary", "--normalize", "--lambda", 0.05),
        *("--layer", 2, "--auxiliary", f"hf:{model}"),
    )
    binarize = (
        *("binarize", "--format", "sequences", "--train", english_text[1], "--tokenizer", f"hf:{model}"),
        *("--output", tmp_path / "tokens", "--max-length", 40),
    )
    tokens = tmp_path / "tokens" / "train"
    coding = ("encode", tokens, "--auxiliary", f"hf:{model}", *small, "--dictionary", tmp_path / "dictionary")
    (tmp_path / "model.pt").touch()
    other = ("convert", tmp_path / "atoms.npy", tmp_path / "third", "--normalize", "--lambda", 0.05)
    commands = [
        *(convert, binarize, (*coding, "--output", tmp_path / "store"), ("doctor",), ("auxiliary",), ("dictionary",)),
        (*other, "--auxiliary", tmp_path / "model.pt"),
        (*coding, "--output", tmp_path / "fourth", "--solver", "spams"),
    ]
    done = mlsm(python, *commands)
    doctor = done[3]
    for one in done[:3]:
        assert one.status == 0, one.stdout + one.stderr
    assert doctor.status == 1
    assert re.search(r"^ BAD  fairseq +fairseq is missing; fix: pip", doctor.stdout, flags=re.M)
    assert ", ".join(f"mlsm {name}" for name in WITHOUT_FAIRSEQ) in doctor.stdout.splitlines()[-2]
    problems = []
    for one in done[4:]:
        lines = [line for line in one.stderr.splitlines() if line.startswith("mlsm: error: ")]
        assert one.status == 1
        assert "Traceback" not in one.stderr
        assert len(lines) == 1, one.stderr
        problems += lines
    for problem in problems[:2]:
        assert re.match("mlsm: error: fairseq is missing; fix: pip install", problem)
    assert "fairseq is missing; fix: pip install" in problems[2]
    assert "this needs spams" in problems[3]

    learned = run(
        f"""
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.hidden_states.sources import source_of
from mlsm_plugin.huggingface.coding import learn_from_sequences
for kind, more in (("topk", dict(k=4)), ("lasso", dict(backend="torch", iterations=5))):
    settings = LearningSettings(layer=2, coder=kind, atoms=24, tokens=500, batch_size=50, threads=1, **more)
    print(learn_from_sequences({str(tokens)!r}, {str(model)!r}, output={str(tmp_path)!r} + "/" + kind,
                               settings=settings).num_atoms)
try:
    source_of({str(tmp_path / "model.pt")!r})
except Exception as error:
    print(error)
""",
        python=python,
    )
    assert learned.stdout.splitlines().count("24") == 2
    assert "would be a fairseq checkpoint, but fairseq does not work" in learned.stdout
    plugin = tmp_path / "my_plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text("import mlsm_plugin\nprint('the plugin was imported')\n")
    topk = ("--dictionary", tmp_path / "topk", "--output", tmp_path / "other", "--user-dir", plugin)
    (with_plugin,) = mlsm(python, (*coding, *topk))
    assert with_plugin.status == 0, with_plugin.stderr
    assert "the plugin was imported" in with_plugin.stdout


@pytest.mark.slow
def test_a_model_is_adapted_without_fairseq(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    python = environment_without_fairseq(tmp_path / "environment")
    model = make_model("bert", english_text[1], tmp_path / "bert", kind=AutoModelForMaskedLM)
    small = ("--objective", "mlsm+mlm", "--max-length", 32, "--atoms", 40, "--updates", 2, "--batch-size", 4)
    output = ("--output", tmp_path / "adapted")
    models = (model, tmp_path / "adapted" / "model")
    files = write_labelled(tmp_path, splits=("train", "valid"))
    words = ("finetune", *files, "--output", tmp_path / "classifier", "--max-epoch", 1, "--cpu", "--model")
    (tmp_path / "model.pt").touch()
    adapt, evaluate, index, query, finetune, refused = mlsm(
        python,
        ("adapt", model, "--text", english_text[1], *output, *small, "--tokens", 4000, "--cpu"),
        ("evaluate", "encoder", *models, "--text", english_text[1], "--queries", 20),
        ("search", "index", english_text[1], "--model", models[1], "--output", tmp_path / "index"),
        ("search", "query", tmp_path / "index", "the name of a value"),
        (*words, models[1]),
        (*words, tmp_path / "model.pt"),
    )
    assert adapt.status == 0, adapt.stderr
    assert "held-out mlm_loss" in adapt.stdout
    assert "BM25" in evaluate.stdout, evaluate.stderr
    assert " documents, " in index.stdout
    assert "property" in query.stdout
    assert re.search(r"^ +mean +[\d.]+$", finetune.stdout, flags=re.M), finetune.stderr
    assert "fairseq is missing; fix: pip install" in refused.stderr
    script = REPOSITORY / "examples" / "huggingface" / "adapt.py"
    texts = (english_text[1], english_text[1])
    words = [str(word) for word in (python, script, model, *texts, tmp_path / "taco", *small, "--objective", "taco")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run(words, env=environment, check=True, capture_output=True)
    assert (tmp_path / "taco" / "model" / "model.safetensors").exists()
