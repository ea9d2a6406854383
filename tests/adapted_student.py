"""The output of ``mlsm adapt --student``, made once for a run of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import made_once, mlsm
from tests.tiny_hf_models import make_model

ATOMS = 12


def adapted_student(tmp_path_factory: pytest.TempPathFactory, text: Path, *flags: object) -> Path:
    """The output of an adaptation of a student, with the vocabulary of its teacher or, by ``flags``, another.

    A test that changes something changes it back, or a copy.
    """

    def make(root: Path) -> None:
        lines = text.read_text(encoding="utf-8").splitlines(keepends=True)[:120]
        (root / "text.txt").write_text("".join(lines), encoding="utf-8")
        model = make_model("bert", root / "text.txt", root / "model")
        words = ("--student", "1x64", *flags, "--text", root / "text.txt", "--output", root / "out")
        coding = ("--atoms", ATOMS, "--k", 3, "--tokens", 400, "--max-length", 24)
        mlsm("adapt", model, *words, *coding, "--updates", 1, "--batch-size", 4, "--bf16", "off", "--cpu")

    return made_once(tmp_path_factory, f"adapted{len(flags)}", make) / "out"
