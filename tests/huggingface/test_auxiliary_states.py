"""Hidden states of an auxiliary model for the masked tokens of a batch."""

from __future__ import annotations

import pytest
import torch

from mlsm_plugin.core.hidden_states.hf_encoder import HuggingFaceEncoder
from mlsm_plugin.huggingface.auxiliary_states import AuxiliaryStates
from mlsm_plugin.huggingface.collators import NO_TOKEN
from tests.huggingface.tiny_corpus import make_tokenizer, tiny_bert

IDS = torch.tensor([[2, 9, 8, 7, 3], [2, 6, 3, NO_TOKEN, NO_TOKEN]])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceEncoder:
    folder = tmp_path_factory.mktemp("auxiliary")
    tiny_bert(7, initializer_range=0.3, max_position_embeddings=12).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return HuggingFaceEncoder(folder, layer=1, device="cpu")


def test_states_are_those_of_each_sequence_alone(encoder: HuggingFaceEncoder) -> None:
    states = AuxiliaryStates(encoder).of_places(IDS, torch.tensor([1, 3, 6, 6]))
    first = encoder.hidden_states(IDS[:1])[0]
    second = encoder.hidden_states(IDS[1:, :3])[0]
    torch.testing.assert_close(states, torch.stack([first[1], first[3], second[1], second[1]]), rtol=1e-4, atol=1e-5)


def test_the_precision_of_a_training_does_not_change_them(encoder: HuggingFaceEncoder) -> None:
    reader = AuxiliaryStates(encoder)
    expected = reader.of_places(IDS, torch.tensor([1, 6]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reader.of_places(IDS, torch.tensor([1, 6])), expected)


def test_a_sequence_that_is_too_long_is_an_error(encoder: HuggingFaceEncoder) -> None:
    with pytest.raises(ValueError, match=r"a sequence for the auxiliary model has 13 tokens.*at most 12"):
        AuxiliaryStates(encoder).of_places(torch.full((1, 13), 9), torch.tensor([1]))
