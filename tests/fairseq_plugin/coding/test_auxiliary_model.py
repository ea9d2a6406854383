"""Hidden states of masked tokens for training without a store."""

from __future__ import annotations

import pickle

import pytest
import torch

from mlsm_plugin.core.hidden_states.sources import open_encoder
from mlsm_plugin.fairseq_plugin.coding.auxiliary_model import AuxiliaryModel
from tests.conftest import Pipeline

TOKENS = torch.tensor([[0, 9, 8, 7, 2], [0, 5, 2, 1, 1]])
CHOSEN = torch.tensor([[False, True, False, True, False], [False, True, False, False, False]])


def reader(pipeline: Pipeline, **changes: object) -> AuxiliaryModel:
    settings = {"checkpoint": pipeline.auxiliary, "fp16": False, "tokens_per_sample": 48, **changes}
    return AuxiliaryModel(pipeline.data_bin, **settings)


@pytest.mark.parametrize("layer", [0, 1, None])
def test_states_are_those_of_the_layer_after_pickling_too(pipeline: Pipeline, layer: int | None) -> None:
    found = reader(pipeline, layer=layer)
    encoder = open_encoder(pipeline.auxiliary, pipeline.data_bin, layer=2 if layer is None else layer, device="cpu")
    expected = encoder.hidden_states(TOKENS)[CHOSEN]
    torch.testing.assert_close(found.states(TOKENS, CHOSEN), expected)
    copied = pickle.loads(pickle.dumps(found))
    torch.testing.assert_close(copied.states(TOKENS, CHOSEN), expected)
    assert copied.vocabulary.symbols == found.vocabulary.symbols


def test_reading_the_model_does_not_change_random_numbers(pipeline: Pipeline) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    reader(pipeline).load_encoder()
    assert torch.equal(torch.rand(3), expected)


def test_errors_name_the_option(pipeline: Pipeline) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.* \(--auxiliary-checkpoint\)"):
        reader(pipeline, checkpoint="nowhere.pt")
    with pytest.raises(ValueError, match="--layer 9 is out of range"):
        reader(pipeline, layer=9).load_encoder()
    with pytest.raises(ValueError, match="--tokens-per-sample 4096 is more than the"):
        reader(pipeline, tokens_per_sample=4096).load_encoder()
