"""What an adaptation is made of: which settings belong together, and which are in range."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceSource
from mlsm_plugin.huggingface.adaptation_settings import Adaptation
from tests.huggingface.tiny_corpus import tiny_bert


def test_settings_out_of_range_are_one_line() -> None:
    with pytest.raises(ValueError, match="objective must be one of mlm, mlsm"):
        Adaptation("model", ["text"], "out", objective="none")
    for epochs in (0, math.inf, math.nan):
        with pytest.raises(ValueError, match="epochs must be"):
            Adaptation("model", ["text"], "out", epochs=epochs)
    with pytest.raises(ValueError, match="--split is only allowed with --dataset"):
        Adaptation("model", ["text"], "out", split="test")
    student = Adaptation("model", ["text"], "out", objective="mlm", student="4x256", vocab_size=4000)
    with pytest.raises(ValueError, match="vocab_size is not for --objective distill"):
        replace(student, objective="distill", teacher="teacher")
    assert replace(student, objective="distill-vectors", teacher="teacher").teacher_model == "teacher"
    assert replace(student, objective="distill-vectors").teacher_model == "model"
    with pytest.raises(ValueError, match="distill-vectors need --teacher, and no other objective takes one"):
        replace(student, teacher="teacher")


def test_the_model_itself_is_coded_unless_another_is_named(tmp_path: Path) -> None:
    assert Adaptation("model", ["text"], "out").auxiliary_model == "model"
    assert Adaptation("model", ["text"], "out", objective="mlsm", auxiliary="other").auxiliary_model == "other"
    tiny_bert().save_pretrained(tmp_path)
    assert HuggingFaceSource.layers_of(tmp_path) == 2
