"""Which sequences of a text are trained on, and which are held out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.files.step_record import StepRecord
from mlsm_plugin.huggingface import TokenSequences
from mlsm_plugin.huggingface.adaptation_text import AdaptationText
from tests.huggingface.tiny_adaptation import LENGTH, setup_of


def test_the_last_sequences_are_held_out(start: Path, tmp_path: Path) -> None:
    train, valid = AdaptationText(setup_of(start, tmp_path)).sequences
    whole = TokenSequences(tmp_path / "tokens")
    assert len(train) + len(valid) == len(whole)
    assert len(valid) == np.ceil(0.02 * len(whole))
    np.testing.assert_array_equal(valid[len(valid) - 1], whole[len(whole) - 1])


def test_nothing_is_held_out_beside_a_valid_text(start: Path, tmp_path: Path) -> None:
    text = AdaptationText(setup_of(start, tmp_path, valid_texts=[str(start / "valid.txt")]))
    train, valid = text.sequences
    assert len(train) == len(TokenSequences(tmp_path / "tokens"))
    assert len(valid) == len(TokenSequences(tmp_path / "valid"))
    assert text.coded_sequences == [train, valid]
    assert text.sequences[0] is train  # opened once


def test_a_text_in_another_vocabulary_has_the_same_parts(start: Path, tmp_path: Path) -> None:
    setup = setup_of(start, tmp_path, student="1x64", vocab_size=300, objective="mlsm")
    text = AdaptationText(setup)
    record = StepRecord(tmp_path / "steps.json")
    for step in (text.tokenizer_step(), text.text_step(), text.alignment_step()):
        record.run(step)
    assert text.tokenizer.vocabulary_fingerprint != setup.source_tokenizer.vocabulary_fingerprint
    for sequences, coded in zip(text.sequences, text.coded_sequences, strict=True):
        assert len(sequences) == len(coded)
    assert text.coded_sequences[0].fingerprint != text.sequences[0].fingerprint


def test_a_column_of_files_is_read_as_documents(start: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": f"Text {number}."}) + "\n" for number in range(9)), encoding="utf-8")
    text = AdaptationText(setup_of(start, tmp_path, texts=[str(rows)], column="body"))
    StepRecord(tmp_path / "steps.json").run(text.documents_step())
    assert text.files == [str(tmp_path / "documents.txt")]
    assert (tmp_path / "documents.txt").read_text(encoding="utf-8").startswith("Text 0.\n\nText 1.\n\n")


@pytest.mark.parametrize("holds_out", [True, False])
def test_a_valid_text_decides_the_model_only_in_folders_of_earlier_versions(
    start: Path, tmp_path: Path, holds_out: bool
) -> None:
    settings = {"holds_out": False} if holds_out else {}
    entry = {"signature": {"settings": settings}, "outputs": {"valid/ids.npy": {"sha256": "0"}}, "done": True}
    (tmp_path / "steps.json").write_text(json.dumps({"text": entry}), encoding="utf-8")
    step = AdaptationText(setup_of(start, tmp_path, valid_texts=[str(start / "valid.txt")])).text_step()
    assert (start / "valid.txt" in step.evaluated) is holds_out
    assert (start / "valid.txt" in step.inputs) is not holds_out
    assert step.settings["max_length"] == LENGTH
