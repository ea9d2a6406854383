"""The loss of a masked LM on a split, against a loop over its blocks."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary

from mlsm_plugin import hub
from mlsm_plugin.core.sparse_coding.stored_codes import covered_positions
from mlsm_plugin.evaluation.masked_batches import MASKED_SHARE
from mlsm_plugin.evaluation.masked_lms import NoMaskedLmError
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockReader, BlockSettings
from tests.script_module import load_script
from tests.tiny_models import TinyData, save_untrained_npm

load_script("research/compare_objectives.py")
from comparison.masked_lm_loss import evaluate_masked_lm  # noqa: E402

BLOCKS = BlockSettings(24, "none")


def most_frequent_half(dictionary: Dictionary) -> set[int]:
    """Ids of the most frequent types, as many as make up at most half of all counts."""
    found, seen = set(), 0
    for token in sorted(range(len(dictionary)), key=lambda token: -dictionary.count[token]):
        seen += dictionary.count[token]
        if seen > sum(dictionary.count) / 2:
            return found
        found.add(token)
    return found


def test_loss_is_the_mean_over_all_masked_tokens(tiny: TinyData) -> None:
    found = evaluate_masked_lm(tiny.model, tiny.data_bin, "valid", BLOCKS, seed=5, device="cpu")
    model, reader = hub.from_pretrained(tiny.model.parent), BlockReader(tiny.data_bin, "valid", BLOCKS)
    special = torch.tensor([0, 1, 2, 3])  # unknown tokens are not predicted either
    frequent = most_frequent_half(reader.dictionary)
    losses: dict[str, list[float]] = {"frequent": [], "repeated": [], "new": []}
    with torch.no_grad():
        for number in range(len(reader)):
            for block in reader.block(number):
                drawn = torch.from_numpy(covered_positions(block.positions.numpy(), coverage=MASKED_SHARE, seed=5))
                masked = drawn & ~torch.isin(block.tokens, special)
                inputs = torch.where(masked, model.task.mask_idx, block.tokens)
                logits = model.model(inputs[None])[0][0].double().log_softmax(dim=-1)
                for place in masked.nonzero().flatten().tolist():
                    token = int(block.tokens[place])
                    kind = "frequent" if token in frequent else "repeated" if token in inputs.tolist() else "new"
                    losses[kind].append(-float(logits[place, token]) / math.log(2))
    everything = [loss for own in losses.values() for loss in own]
    assert found.masked_tokens == len(everything) > 300
    assert found.bits == pytest.approx(statistics.fmean(everything), rel=1e-6)
    assert all(losses.values())
    assert found.repeated_bits == pytest.approx(statistics.fmean(losses["repeated"]), rel=1e-6)
    assert found.new_bits == pytest.approx(statistics.fmean(losses["new"]), rel=1e-6)
    again = evaluate_masked_lm(tiny.model, tiny.data_bin, "valid", BLOCKS, seed=6, device="cpu")
    assert again.bits != found.bits
    half = evaluate_masked_lm(tiny.model, tiny.data_bin, "valid", BLOCKS, seed=5, device="cpu", fp16=True)
    assert half.bits == pytest.approx(found.bits, rel=1e-3)


def test_a_model_without_a_trained_head_is_refused(tiny: TinyData, tmp_path: Path) -> None:
    with pytest.raises(NoMaskedLmError, match="nonparametric_masked_lm has no loss on it"):
        evaluate_masked_lm(save_untrained_npm(tiny, tmp_path), tiny.data_bin, "valid", BLOCKS, device="cpu")
