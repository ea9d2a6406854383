"""Changed hidden states of a layer decide all that follows, in every type of model; and no hook is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel

from mlsm_plugin.core.hidden_states.changed_states import changed_library_states, in_float32, layers_of_library
from mlsm_plugin.core.hidden_states.hf_encoder import SUPPORTED
from tests.tiny_hf_models import make_model

FIRST = torch.tensor([[8, 9, 10, 11, 12, 13]])
SECOND = torch.tensor([[20, 21, 22, 23, 24, 25]])


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_with_the_hidden_states_of_another_text_its_output_follows(
    model_type: str, english_text: tuple[Path, Path], tmp_path: Path
) -> None:
    model = AutoModel.from_pretrained(make_model(model_type, english_text[1], tmp_path / "model")).eval()
    with torch.no_grad():
        plain = model(input_ids=FIRST)[0]
        second = model(input_ids=SECOND, output_hidden_states=True, return_dict=True)
        assert (plain - second[0]).abs().max() > 0.01
        for layer, states in enumerate(second.hidden_states):
            with changed_library_states(model, layer, lambda _hidden, states=states: states):  # type: ignore[misc]
                changed = model(input_ids=FIRST, return_dict=True)[0]
            torch.testing.assert_close(changed, second[0], rtol=0, atol=1e-5)
            with pytest.raises(RuntimeError, match="the end"), changed_library_states(model, layer, torch.zeros_like):
                raise RuntimeError("the end")
        assert torch.equal(model(input_ids=FIRST)[0], plain)


def test_changes_are_computed_in_float32() -> None:
    seen: list[torch.dtype] = []

    def change(hidden: Tensor) -> Tensor:
        seen.append(hidden.dtype)
        return hidden + 1

    for precision in (torch.float16, torch.bfloat16):
        hidden = torch.zeros(2, 3, dtype=precision)
        assert torch.equal(in_float32(change)(hidden), torch.ones(2, 3, dtype=precision))
    assert seen == [torch.float32] * 2


def test_a_model_without_known_layers_is_one_line() -> None:
    model = BertModel(BertConfig(num_hidden_layers=0, hidden_size=4, num_attention_heads=1, intermediate_size=4))
    assert len(layers_of_library(model)) == 0
    with pytest.raises(ValueError, match="the layers of BertEmbeddings were not found"):
        layers_of_library(model.embeddings)
