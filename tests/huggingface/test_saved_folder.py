"""A written folder is opened and compared with the trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from mlsm_plugin.core.hidden_states.hf_encoder import load_masked_lm
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer, load_fast_tokenizer
from mlsm_plugin.huggingface import MaskedLmModel
from mlsm_plugin.huggingface.saved_folder import check_saved, save_pretrained
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

LINES = ["The name is bound.", "A value is returned, or none."]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_other_weights_and_ids_are_refused(kind: str, tiny: TinyData, tmp_path: Path) -> None:
    start = make_model(kind, tiny.text, tmp_path / "start")
    model = MaskedLmModel.of(load_masked_lm(start, new_head="for this test"))
    save_pretrained(tmp_path / "out", model, load_fast_tokenizer(start))
    check_saved(tmp_path / "out", model, HuggingFaceTokenizer(start), LINES)
    other = make_model("modernbert", tiny.text, tmp_path / "other")
    with pytest.raises(ValueError, match=r"gives other ids for .The name is bound\.. than that of the training"):
        check_saved(tmp_path / "out", model, HuggingFaceTokenizer(other), LINES)
    with torch.no_grad():
        model.get_input_embeddings().weight[7, 3] += 1
    with pytest.raises(ValueError, match=r"holds another .*embeddings.* than the trained model"):
        check_saved(tmp_path / "out", model, HuggingFaceTokenizer(start), LINES)


def test_a_folder_without_a_head_is_compared_with_the_encoder(tiny: TinyData, tmp_path: Path) -> None:
    start = make_model("bert", tiny.text, tmp_path / "start", kind=AutoModel)
    with pytest.raises(ValueError, match="saved without a masked-LM head"):
        load_masked_lm(start)
    model = load_masked_lm(start, new_head="which learns with the text")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
