"""A small BERT with random weights, its text as sequences of ids, and a dictionary for one of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.sparse_coding.coder import SparseCoder, load_coder
from tests.conftest import made_once, mlsm
from tests.tiny_hf_models import make_model

LAYER, MAX_LENGTH = 2, 40
LINES = 150
SMALL = ("--threads", 1, "--shard-tokens", 900, "--batch-tokens", 400, "--device", "cpu")


@dataclass(frozen=True)
class CodedModel:
    """Paths; read only: copy what a test changes."""

    text: Path
    model: Path
    dictionary: Path
    tokens: Path

    @property
    def coder(self) -> SparseCoder:
        return load_coder(self.dictionary)

    def words(self, output: Path, *more: object, tokens: Path | None = None) -> tuple[object, ...]:
        """Of ``mlsm encode``."""
        common = ("--dictionary", self.dictionary, "--output", output, *SMALL)
        return ("encode", tokens or self.tokens, "--auxiliary", f"hf:{self.model}", *common, *more)


def settings(**more: object) -> CodingSettings:
    return CodingSettings(layer=LAYER, threads=1, shard_tokens=900, batch_tokens=400, **more)  # type: ignore[arg-type]


def coded_model(tmp_path_factory: pytest.TempPathFactory, text: Path) -> CodedModel:
    root = made_once(tmp_path_factory, "coded-model", lambda folder: _make(folder, text))
    return _within(root)


def _within(root: Path) -> CodedModel:
    return CodedModel(root / "text.txt", root / "bert", root / "dictionary", root / "tokens" / "train")


def _make(root: Path, text: Path) -> None:
    made = _within(root)
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)[:LINES]
    made.text.write_text("".join(lines), encoding="utf-8")
    make_model("bert", made.text, made.model)
    atoms = np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32)
    np.save(root / "atoms.npy", atoms)
    mlsm(
        *("convert", root / "atoms.npy", made.dictionary, "--normalize", "--lambda", 0.05),
        *("--layer", LAYER, "--auxiliary", f"hf:{made.model}"),
    )
    words = ("--train", made.text, "--tokenizer", f"hf:{made.model}", "--output", made.tokens.parent)
    mlsm("binarize", "--format", "sequences", *words, "--max-length", MAX_LENGTH)


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of each file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
