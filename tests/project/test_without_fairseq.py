"""Where fairseq is not installed: what imports, which commands work, and what the others say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

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


def mlsm(python: Path, words: tuple[object, ...], **variables: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from mlsm_plugin.cli.main import main; sys.exit(main({[str(word) for word in words]!r}))"
    return run(code, python=python, check=False, **variables)


@pytest.mark.slow
def test_from_text_to_codes_without_fairseq(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    python = environment_without_fairseq(tmp_path / "environment")
    model = make_model("bert", english_text[1], tmp_path / "bert")
    np.save(tmp_path / "atoms.npy", np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32))
    small = ("--threads", 1, "--device", "cpu")

    def succeed(*words: object, **variables: str) -> str:
        result = mlsm(python, words, **variables)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    succeed(
        *("convert", tmp_path / "atoms.npy", tmp_path / "dictionary", "--normalize", "--lambda", 0.05),
        *("--layer", 2, "--auxiliary", f"hf:{model}"),
    )
    succeed(
        *("binarize", "--format", "sequences", "--train", english_text[1], "--tokenizer", f"hf:{model}"),
        *("--output", tmp_path / "tokens", "--max-length", 40),
    )
    tokens = tmp_path / "tokens" / "train"
    coding = ("encode", tokens, "--auxiliary", f"hf:{model}", *small, "--dictionary", tmp_path / "dictionary")
    succeed(*coding, "--output", tmp_path / "store")

    learned = run(
        f"""
from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.huggingface.coding import learn_from_sequences
for kind, more in (("topk", dict(k=4)), ("lasso", dict(backend="torch", iterations=5))):
    settings = LearningSettings(layer=2, coder=kind, atoms=24, tokens=500, batch_size=50, threads=1, **more)
    print(learn_from_sequences({str(tokens)!r}, {str(model)!r}, output={str(tmp_path)!r} + "/" + kind,
                               settings=settings).num_atoms)
""",
        python=python,
    )
    assert learned.stdout.splitlines().count("24") == 2
    plugin = tmp_path / "my_plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text("import mlsm_plugin\nprint('the plugin was imported')\n")
    printed = succeed(*coding, "--dictionary", tmp_path / "topk", "--output", tmp_path / "other", "--user-dir", plugin)
    assert "the plugin was imported" in printed

    doctor = mlsm(python, ("doctor",))
    assert doctor.returncode == 1
    assert re.search(r"^ BAD  fairseq +fairseq is missing; fix: pip", doctor.stdout, flags=re.M)
    assert ", ".join(f"mlsm {name}" for name in WITHOUT_FAIRSEQ) in doctor.stdout.splitlines()[-2]

    def fails(*words: object) -> str:
        result = mlsm(python, words)
        lines = [line for line in result.stderr.splitlines() if line.startswith("mlsm: error: ")]
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        assert len(lines) == 1, result.stderr
        return lines[0]

    for command in ("auxiliary", "dictionary"):
        assert re.match("mlsm: error: fairseq is missing; fix: pip install", fails(command))
    (tmp_path / "model.pt").touch()
    other = ("convert", tmp_path / "atoms.npy", tmp_path / "third", "--normalize", "--lambda", 0.05)
    assert "fairseq is missing; fix: pip install" in fails(*other, "--auxiliary", tmp_path / "model.pt")
    code = f"from mlsm_plugin.core.hidden_states.sources import source_of\nsource_of({str(tmp_path / 'model.pt')!r})"
    assert "would be a fairseq checkpoint, but fairseq does not work" in run(code, python=python, check=False).stderr
    assert "this needs spams" in fails(*coding, "--output", tmp_path / "fourth", "--solver", "spams")


@pytest.mark.slow
def test_a_model_is_adapted_without_fairseq(english_text: tuple[Path, Path], tmp_path: Path) -> None:
    python = environment_without_fairseq(tmp_path / "environment")
    model = make_model("bert", english_text[1], tmp_path / "bert", kind=AutoModelForMaskedLM)
    small = ("--objective", "mlsm+mlm", "--max-length", 32, "--atoms", 40, "--updates", 2, "--batch-size", 4)
    output = ("--output", tmp_path / "adapted")
    result = mlsm(python, ("adapt", model, "--text", english_text[1], *output, *small, "--tokens", 4000, "--cpu"))
    assert result.returncode == 0, result.stderr
    assert "held-out mlm_loss" in result.stdout
    models = (model, tmp_path / "adapted" / "model")
    result = mlsm(python, ("evaluate", "encoder", *models, "--text", english_text[1], "--queries", 20))
    assert "BM25" in result.stdout, result.stderr
    index = ("search", "index", english_text[1], "--model", models[1], "--output", tmp_path / "index")
    assert " documents, " in mlsm(python, index).stdout
    assert "property" in mlsm(python, ("search", "query", tmp_path / "index", "the name of a value")).stdout
    files = write_labelled(tmp_path, splits=("train", "valid"))
    words = ("finetune", *files, "--output", tmp_path / "classifier", "--max-epoch", 1, "--cpu", "--model")
    result = mlsm(python, (*words, models[1]))
    assert re.search(r"^ +mean +[\d.]+$", result.stdout, flags=re.M), result.stderr
    (tmp_path / "model.pt").touch()
    assert "fairseq is missing; fix: pip install" in mlsm(python, (*words, tmp_path / "model.pt")).stderr
    script = REPOSITORY / "examples" / "huggingface" / "adapt.py"
    texts = (english_text[1], english_text[1])
    words = [str(word) for word in (python, script, model, *texts, tmp_path / "taco", *small, "--objective", "taco")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run(words, env=environment, check=True, capture_output=True)
    assert (tmp_path / "taco" / "model" / "model.safetensors").exists()
