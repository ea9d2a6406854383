"""Preprocessing with Python; ``tests/cli/test_preprocess.py`` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.core.coding.coder_learning import LearningSettings
from mlsm_plugin.core.coding.settings import PreprocessSettings
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.fairseq_plugin.pipelines.preprocessing import preprocess
from mlsm_plugin.fairseq_plugin.text.sentencepiece_training import TokenizerSettings
from tests.conftest import TINY_MODEL
from tests.tiny_models import TinyData


def test_a_given_model_codes_what_it_tokenizes(tiny: TinyData, tmp_path: Path) -> None:
    texts = {"train": [str(tiny.text)], "valid": [str(tiny.text)], "test": []}
    learning = LearningSettings(layer=0, atoms=8, tokens=300, iterations=2, threads=1)
    coding = CodingSettings(layer=0, blocks=BlockSettings(24))
    settings = PreprocessSettings(auxiliary=str(tiny.model))
    plain = TokenizerSettings(vocab_size=100)
    record = preprocess(texts, tmp_path / "out", settings, plain, learning, coding, layer=1)
    assert [(name, state) for name, state, *_ in record.rows] == [
        ("binarize", "done"),
        ("dictionary", "done"),
        ("encode", "done"),
    ]
    assert CodeStore(tmp_path / "out" / "data-bin" / "valid.codes").num_atoms == 8
    assert not (tmp_path / "out" / "data-bin" / "test.codes").exists()
    lower = TokenizerSettings(vocab_size=100, lowercase=True)
    with pytest.raises(ValueError, match="need a tokenizer that is trained here"):
        preprocess(texts, tmp_path / "other", settings, lower, learning, coding)


@pytest.mark.slow
def test_a_folder_that_an_earlier_version_began_stays_current(tiny: TinyData, tmp_path: Path) -> None:
    """Its tokenizer has a coverage of 0.9995, which is no longer the default."""
    texts = {"train": [str(tiny.text)], "valid": [str(tiny.text)], "test": []}
    learning = LearningSettings(layer=0, atoms=8, tokens=300, iterations=2, threads=1)
    coding = CodingSettings(layer=0, blocks=BlockSettings(24))
    settings = PreprocessSettings(auxiliary_arch="mlsm_roberta_tiny", auxiliary_updates=1)
    flags = [*TINY_MODEL[2:], "--batch-size", "8", "--num-workers", "0", "--cpu"]
    for state, coverage in (("done", 0.9995), ("current", None)):
        tokenizer = TokenizerSettings(vocab_size=100, character_coverage=coverage)
        record = preprocess(texts, tmp_path / "out", settings, tokenizer, learning, coding, flags=flags)
        assert {row[1] for row in record.rows} == {state}
