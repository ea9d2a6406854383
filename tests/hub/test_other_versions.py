"""Folders that this package writes, opened by version 4 of ``transformers``, and folders of version 4, opened here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import tasks
from transformers import AutoModelForMaskedLM, AutoTokenizer

from mlsm_plugin.core.files.hf_files import save_pretrained
from tests.conftest import REPOSITORY, made_once, mlsm
from tests.hub.in_library import opened
from tests.hub.modern_models import BUCKETS, NPM, WINDOW, save_modern, spread_weights
from tests.tiny_hf_models import make_model, make_tokenizer
from tests.tiny_models import MASKED_LM, POSITIONS, TinyData, positions, save_model
from tests.tiny_run import seeded_model, training_config

pytestmark = pytest.mark.slow

# the oldest version that the extra [hf] takes, and the one that the BabyLM pipeline of 2026 pins
VERSIONS = ("4.48.0", "4.51.3")
NEEDED = ("huggingface_hub==0.30.2", "tokenizers==0.21.1")
OF_HUB = ("requests", "urllib3", "idna", "certifi", "charset_normalizer")
ADAPTING = ("--objective", "mlm", "--max-length", 32, "--updates", 3, "--batch-size", 4, "--learning-rate", 0.05)
UNTIED = {"tie_word_embeddings": False}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("bert", "roberta", "xlm-roberta", "modernbert", "deberta-v2")},
    **{f"{kind}-untied": (kind, UNTIED) for kind in ("bert", "mpnet", "deberta", "deberta-v2")},
    "deberta-v2-other-head": ("deberta-v2", {"legacy": False}),
}
ON_CPU = ("--bf16", "off", "--cpu", "--threads", 1)


@pytest.fixture(scope="module", params=VERSIONS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with another version of the library and what it needs, apart from this environment."""
    return install_version(request.param, tmp_path_factory)


def install_version(
    version: str | None, tmp_path_factory: pytest.TempPathFactory, *, more: tuple[str, ...] = ()
) -> Path:
    """A folder with a version of the library and what it needs; the test is skipped where it cannot be installed.

    ``more`` are further packages. None: these only.
    """

    def install(folder: Path) -> None:
        # what is not imported need not be compiled
        options = ("--quiet", "--no-compile", "--no-deps", "--target", str(folder))
        command = [sys.executable, "-m", "pip", "install", *options]
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        packages = [*more, *(() if version is None else (f"transformers=={version}", *NEEDED, *OF_HUB))]
        done = subprocess.run([*command, *packages], env=environment, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            pytest.skip(f"{' '.join(packages)} cannot be installed: {reason}")

    return made_once(tmp_path_factory, "-".join([f"transformers-{version}", *more]), install)


@pytest.fixture(scope="module")
def folders(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Exports of RoBERTa-like, modern and DeBERTa-like models, and adapted models of Hugging Face."""
    root = tmp_path_factory.mktemp("written")
    cfg = training_config(tiny.data_bin, *positions(POSITIONS), **MASKED_LM)
    roberta = seeded_model(cfg, tasks.setup_task(cfg.task))
    spread_weights(roberta)
    make_tokenizer("modern_byte_level", tiny.text, root / "tokenizer")
    own = AutoTokenizer.from_pretrained(root / "tokenizer")
    own.add_special_tokens({"additional_special_tokens": ["[EXTRA]"]})
    own.save_pretrained(root / "tokenizer")
    texts = ("--train", tiny.text, "--valid", tiny.text)
    mlsm("binarize", "--tokenizer", f"hf:{root}/tokenizer", *texts, "--output", root / "data", "--workers", 1)
    checkpoints = {
        "roberta": save_model(cfg, roberta, root / "run-roberta", tiny.data_bin),
        "npm": save_modern(tiny.data_bin, root / "run-npm", **NPM),
        "modern": save_modern(tiny.data_bin, root / "run-modern", *WINDOW),
        "deberta": save_modern(tiny.data_bin, root / "run-deberta", *BUCKETS, arch="mlsm_deberta_tiny"),
        "own-tokenizer": save_modern(root / "data", root / "run-own", *WINDOW, **NPM),
    }
    for name, checkpoint in checkpoints.items():
        mlsm("convert", checkpoint, root / name, "--text", tiny.text, "--lines", 20)
    for name, (kind, settings) in ADAPTED.items():
        start = make_model(kind, tiny.text, root / f"{name}-start", kind=AutoModelForMaskedLM, **settings)
        mlsm("adapt", start, "--text", tiny.text, "--output", root / f"{name}-out", *ADAPTING, *ON_CPU)
    return [*(root / name for name in checkpoints), *(root / f"{name}-out" / "model" for name in ADAPTED)]


def in_version(library: Path, *words: object) -> None:
    """Run ``in_library.py`` with that version of the library."""
    command = [sys.executable, str(REPOSITORY / "tests" / "hub" / "in_library.py"), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(library), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=library.parent)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_version_4_would_misread_is_refused(library: Path, tiny: TinyData, tmp_path: Path) -> None:
    start = make_model("modernbert", tiny.text, tmp_path / "plain", kind=AutoModelForMaskedLM)  # as version 5 writes it
    save_pretrained(tmp_path / "both", AutoModelForMaskedLM.from_pretrained(start))
    code = "import sys, pathlib; from mlsm_plugin.core.hidden_states.hf_encoder import supported_config as read\n"
    code += "for folder in sys.argv[1:]: print(read(pathlib.Path(folder)).local_rope_theta)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(library), str(REPOSITORY)])}
    command = [sys.executable, "-c", code, str(tmp_path / "both"), str(start)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "500.0\n"
    refused = "was written by transformers 5, and the installed version reads other values of local_rope_theta from it"
    assert f"ValueError: {start} {refused}" in done.stderr


def check_same(there: dict[str, Any], folder: Path) -> None:
    """What a version has read from a folder is what this one reads."""
    here = json.loads(json.dumps(opened(folder)))
    logits = [torch.tensor(found.pop("logits")) for found in (here, there)]
    assert there == here, folder
    assert logits[0].std() > 0.05
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)


def test_version_4_reads_what_this_one_reads(library: Path, folders: list[Path], tmp_path: Path) -> None:
    in_version(library, "open", tmp_path / "read.json", *folders)
    found = json.loads((tmp_path / "read.json").read_text(encoding="utf-8"))
    assert library.name == f"transformers-{found['version']}"
    assert found["read"].keys() == {*map(str, folders)}
    for folder in folders:
        check_same(found["read"][str(folder)], folder)


def test_models_of_version_4_are_read_adapted_and_imported(library: Path, tiny: TinyData, tmp_path: Path) -> None:
    make_tokenizer("modern_byte_level", tiny.text, tmp_path / "tokenizer")
    written, adapted = tmp_path / "written", tmp_path / "adapted"
    in_version(library, "write", written, tmp_path / "tokenizer")
    mlsm("adapt", written, "--text", tiny.text, "--output", adapted, *ADAPTING, *ON_CPU)
    mlsm("convert", written, tmp_path / "imported", "--text", tiny.text, "--lines", 20)
    mlsm("convert", tmp_path / "imported", tmp_path / "exported", "--text", tiny.text, "--lines", 20)
    folders = [written, adapted / "model", tmp_path / "exported"]
    in_version(library, "open", tmp_path / "read.json", *folders)
    found = json.loads((tmp_path / "read.json").read_text(encoding="utf-8"))["read"]
    check_same(found[str(adapted / "model")], adapted / "model")
    check_same(found[str(tmp_path / "exported")], tmp_path / "exported")
    here, there = opened(written), found[str(written)]
    assert there["input_ids"] == here["input_ids"]
    torch.testing.assert_close(torch.tensor(there["logits"]), torch.tensor(here["logits"]), rtol=0, atol=1e-4)
