"""Scoring of minimal pairs, compared with masking one token at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mlsm_plugin import hub
from mlsm_plugin.evaluation.minimal_pairs import pseudo_log_likelihoods
from tests.conftest import Pipeline, failing_mlsm
from tests.tiny_models import TinyData, save_untrained, save_untrained_npm

Capture = pytest.CaptureFixture[str]
SENTENCES = ["The name is bound.", "If the target is an attribute, it is called.", "A", "Names are bound to objects."]


@pytest.fixture(scope="module")
def model(pipeline: Pipeline) -> Any:
    return hub.from_pretrained(pipeline.auxiliary)


def slow_score(model: Any, sentence: str) -> float:
    tokens = model.encode(sentence)
    total = 0.0
    for place in range(1, len(tokens) - 1):
        masked = tokens.clone()
        masked[place] = model.task.mask_idx
        logits = model.model(masked[None])[0][0, place].double()
        total += float(logits.log_softmax(dim=0)[tokens[place]])
    return total


@pytest.mark.parametrize("batch_tokens", [1, 60, 8192])
def test_scores_are_those_of_one_mask_at_a_time(model: Any, batch_tokens: int) -> None:
    with torch.no_grad():
        expected = [slow_score(model, sentence) for sentence in SENTENCES]
    found = pseudo_log_likelihoods(model, SENTENCES, batch_tokens=batch_tokens)
    assert found == pytest.approx(expected, rel=1e-4)
    assert pseudo_log_likelihoods(model, []) == []


def test_a_sentence_that_is_too_long_is_shown_in_part(model: Any) -> None:
    limit = model.model.max_positions()
    with pytest.raises(ValueError, match=rf"more than the {limit} positions of the model: '(w ){{40}}\.\.\.'"):
        pseudo_log_likelihoods(model, ["w " * 10_000])


def test_model_whose_head_was_not_trained_is_refused(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    pairs = tmp_path / "in.jsonl"
    pairs.write_text('{"sentence_good": "a", "sentence_bad": "b"}\n', encoding="utf-8")
    save_untrained(tiny.data_bin, tmp_path / "mlsm", "--mlm-weight", 0, "--num-atoms", 8)
    save_untrained_npm(tiny, tmp_path / "npm")
    for name, why in (("mlsm", "--mlm-weight was 0"), ("npm", "has no loss on it")):
        line = failing_mlsm(capsys, "evaluate-pairs", "--checkpoint", tmp_path / name, "--input", pairs)
        assert "the masked-LM head of this model was not trained" in line
        assert why in line
