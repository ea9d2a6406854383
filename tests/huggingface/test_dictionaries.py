"""Dictionaries and autoencoders of sequences: what ``mlsm dictionary`` learns, from the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.sparse_coding.sparse_coder import SparseCoder
from mlsm_plugin.huggingface.coding import encode_sequences, learn_from_sequences
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.huggingface.coded_model import LAYER, CodedModel, coded_model, files_of, settings

FEW = {"layer": LAYER, "atoms": 24, "tokens": 2000, "threads": 1}
KINDS = {
    "lasso": {"iterations": 10, "batch_size": 50},
    "topk": {"k": 4, "batch_size": 50},
    "batchtopk": {"k": 4, "batch_size": 50, "matryoshka": [8]},
}


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> CodedModel:
    return coded_model(tmp_path_factory, english_text[0])


def learn(made: CodedModel, output: Path, coder: str, *, overwrite: bool = False, **more: object) -> SparseCoder:
    chosen = LearningSettings(coder=coder, **{**FEW, **KINDS[coder], **more})  # type: ignore[arg-type]
    return learn_from_sequences(made.tokens, made.model, output=output, settings=chosen, overwrite=overwrite)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_learned_says_how_and_codes(kind: str, made: CodedModel, tmp_path: Path) -> None:
    coder = learn(made, tmp_path / "coder", kind)
    meta = coder.meta
    assert (coder.num_atoms, coder.dim, meta["layer"], meta["n_atoms"]) == (24, 32, LAYER, 24)
    assert meta["split_fingerprint"] == TokenSequences(made.tokens).fingerprint
    assert meta["auxiliary_fingerprint"] == made.coder.meta["auxiliary_fingerprint"]
    assert (meta["auxiliary"], meta["text"]) == (f"{made.model.parent.name}/bert", "tokens/train")
    assert "blocks" not in meta
    assert 0 < meta["health"]["reconstruction_error"] < 1
    figures = encode_sequences(made.tokens, made.model, coder=coder, settings=settings(), output=tmp_path / "store")
    assert figures.meta is not None
    assert figures.meta["coded_tokens"] > 2000
    assert figures.meta["fingerprints"]["dictionary"] == coder.fingerprint


def test_a_coder_that_is_there_is_kept_and_another_is_refused(made: CodedModel, tmp_path: Path) -> None:
    learn(made, tmp_path / "coder", "lasso")
    before = files_of(tmp_path / "coder")
    assert learn(made, tmp_path / "coder", "lasso").fingerprint == learn(made, tmp_path / "other", "lasso").fingerprint
    with pytest.raises(
        ValueError, match=r"iterations is 10 there and 11 now. Pass --overwrite to `mlsm dictionary`, or delete"
    ):
        learn(made, tmp_path / "coder", "lasso", iterations=11)
    assert files_of(tmp_path / "coder") == before == files_of(tmp_path / "other")
    learn(made, tmp_path / "coder", "lasso", iterations=11, overwrite=True)
    assert files_of(tmp_path / "coder") != before


def test_a_layer_that_does_not_exist_leaves_nothing(made: CodedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--layer 9 is out of range"):
        learn(made, tmp_path / "coder", "topk", layer=9)
    assert not (tmp_path / "coder").exists()
