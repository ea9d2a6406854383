"""Updates of low rank: what is trained, and that the merged model is a stock one with the same outputs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mlsm_plugin.huggingface import LatentSemanticModel, MaskedLmModel
from mlsm_plugin.huggingface.low_rank import add_low_rank, merge_low_rank
from tests.huggingface.tiny_corpus import tiny_bert


def test_only_updates_and_heads_are_trained_and_merging_keeps_the_outputs() -> None:
    pytest.importorskip("peft")
    model = LatentSemanticModel.of(tiny_bert(), num_atoms=7, mlm_weight=1.0).eval()
    names = dict(model.named_parameters()).keys()
    head = {name for name, parameter in model.named_parameters() if not name.startswith("bert.")}
    ids = torch.tensor([[2, 5, 6, 3]])
    before = model(input_ids=ids).logits
    add_low_rank(model, 2)
    assert torch.equal(model(input_ids=ids).logits, before)  # an update begins with 0
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert head <= trained
    assert all(".lora_" in name for name in trained - head)
    assert len(trained - head) == 2 * 6 * model.config.num_hidden_layers  # both factors of six matrices
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    changed = model(input_ids=ids).logits
    assert not torch.allclose(changed, before, atol=1e-3)
    merge_low_rank(model)
    assert torch.allclose(model(input_ids=ids).logits, changed, atol=1e-5)
    assert dict(model.named_parameters()).keys() == names


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="--lora needs the package peft: pip install peft"):
        add_low_rank(MaskedLmModel.of(tiny_bert()), 2)


def test_the_folder_has_no_trace_of_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = MaskedLmModel.of(tiny_bert())
    add_low_rank(model, 2)
    merge_low_rank(model)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("adapter*"))
