"""Hugging Face's ids through the first layers; ``test_hf_encoder.py`` compares every model type with the library."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel

from mlsm_plugin.core.hidden_states.hf_encoder import (
    SUPPORTED,
    HuggingFaceEncoder,
    check_vocabulary,
    positions_of,
    supported_config,
)
from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from tests.tiny_hf_models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def text(english_text: tuple[Path, Path]) -> Path:
    return english_text[1]


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_hidden_states_of_ids_are_the_librarys(model_type: str, text: Path, tmp_path: Path) -> None:
    folder = make_model(model_type, text, tmp_path / "model")
    tokenizer = HuggingFaceTokenizer(folder)
    begin, pad, end = tokenizer.begin_id, tokenizer.pad_id, tokenizer.end_id
    ids = torch.tensor([[begin, 9, 8, end, pad, pad], [begin, 7, 6, 5, 9, end]])
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=ids.ne(pad).long(), output_hidden_states=True).hidden_states
    for layer in (0, 2, 3):
        encoder = HuggingFaceEncoder(f"hf:{folder}", layer=layer, device="cpu")
        found = encoder.hidden_states(ids)
        assert (encoder.pad, encoder.dim, encoder.num_layers) == (pad, 32, 3)
        kept = ids.ne(pad)
        torch.testing.assert_close(found[kept], wanted[layer][kept], rtol=0, atol=1e-5)
        torch.testing.assert_close(encoder._hidden_states(ids, kept), found, rtol=0, atol=0)
    assert encoder.max_tokens == positions_of(supported_config(folder))


def test_embeddings_may_have_more_rows_than_the_tokenizer_has_ids() -> None:
    for largest_id, rows in ((128_000, 128_100), (31_101, 32_102)):  # DeBERTa-v3, an Italian BERT
        check_vocabulary(SimpleNamespace(largest_id=largest_id), rows, Path("model"))  # type: ignore[arg-type]


def test_tokenizer_is_checked_before_the_weights_are_read(text: Path, tmp_path: Path) -> None:
    folder = make_model("bert", text, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read"):
        HuggingFaceEncoder(folder, layer=1, device="cpu")
    with pytest.raises(ValueError, match="--layer 4 is out of range"):
        HuggingFaceEncoder(folder, layer=4, device="cpu")
    larger = make_tokenizer("byte_level", text, tmp_path / "other")
    larger.add_tokens([f"word{number}" for number in range(9)])
    larger.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="the tokenizer's ids need 609 embeddings, the model has 600"):
        HuggingFaceEncoder(folder, layer=1, tokenizer=HuggingFaceTokenizer(tmp_path / "other"), device="cpu")
