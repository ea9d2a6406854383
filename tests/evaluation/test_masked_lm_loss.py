"""The loss of a masked LM on a split, against a loop over its blocks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mlsm_plugin import hub
from mlsm_plugin.evaluation.masked_lm_loss import MASKED_SHARE, evaluate_masked_lm
from mlsm_plugin.hidden_states.block_reader import BlockReader, BlockSettings
from mlsm_plugin.hidden_states.masked_lms import NoMaskedLmError
from mlsm_plugin.sparse_coding.coverage import covered_positions
from tests.tiny_models import TinyData, save_untrained_npm

BLOCKS = BlockSettings(24, "none")


def test_loss_is_the_mean_over_all_masked_tokens(tiny: TinyData) -> None:
    found = evaluate_masked_lm(tiny.model, tiny.data_bin, "valid", BLOCKS, seed=5, device="cpu")
    model, reader = hub.from_pretrained(tiny.model.parent), BlockReader(tiny.data_bin, "valid", BLOCKS)
    special = torch.tensor([0, 1, 2])
    total, count = 0.0, 0
    with torch.no_grad():
        for number in range(len(reader)):
            for block in reader.block(number):
                drawn = torch.from_numpy(covered_positions(block.positions.numpy(), coverage=MASKED_SHARE, seed=5))
                masked = drawn & ~torch.isin(block.tokens, special)
                inputs = torch.where(masked, model.task.mask_idx, block.tokens)
                logits = model.model(inputs[None])[0][0].double().log_softmax(dim=-1)
                total -= float(logits[masked, block.tokens[masked]].sum())
                count += int(masked.sum())
    assert found.masked_tokens == count > 300
    assert found.bits == pytest.approx(total / count / math.log(2), rel=1e-6)
    again = evaluate_masked_lm(tiny.model, tiny.data_bin, "valid", BLOCKS, seed=6, device="cpu")
    assert again.bits != found.bits
    half = evaluate_masked_lm(tiny.model, tiny.data_bin, "valid", BLOCKS, seed=5, device="cpu", fp16=True)
    assert half.bits == pytest.approx(found.bits, rel=1e-3)


def test_a_model_without_a_trained_head_is_refused(tiny: TinyData, tmp_path: Path) -> None:
    with pytest.raises(NoMaskedLmError, match="nonparametric_masked_lm has no loss on it"):
        evaluate_masked_lm(save_untrained_npm(tiny, tmp_path), tiny.data_bin, "valid", BLOCKS, device="cpu")
