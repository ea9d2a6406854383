"""A small NPM model and datastores of its text, made with the commands that users type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Pipeline, made_once, mlsm
from tests.tiny_models import positions, save_untrained

BLOCKS = ("--tokens-per-sample", 48)


@dataclass(frozen=True)
class Retrieval:
    """Paths; read only."""

    data_bin: Path
    checkpoint: Path
    store: Path


@pytest.fixture(scope="session")
def retrieval(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Retrieval:
    root = made_once(tmp_path_factory, "retrieval", lambda root: _make(_at(root, pipeline), pipeline))
    return _at(root, pipeline)


def _at(root: Path, pipeline: Pipeline) -> Retrieval:
    return Retrieval(pipeline.data_bin, root / "model" / "checkpoint_last.pt", root / "store")


def _make(made: Retrieval, pipeline: Pipeline) -> None:
    options = {"task": "nonparametric_masked_lm", "criterion": "span_contrastive"}
    save_untrained(pipeline.data_bin, made.checkpoint.parent, *positions(64, 48), **options)
    mlsm(*build_words(made, made.store, "--shard-tokens", 500))


def build_words(retrieval: Retrieval, output: Path, *options: object) -> Sequence[object]:
    """``mlsm npm datastore`` of the validation text."""
    words = ("npm", "datastore", retrieval.data_bin, "--checkpoint", retrieval.checkpoint, "--output", output)
    return (*words, "--splits", "valid", *BLOCKS, "--batch-tokens", 400, *options)
