"""Tokens for masks, of a model with more embeddings than tokens, and steered in several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.explore.masked_tokens import MaskedTokens
from tests.tiny_hf_models import VOCABULARY, make_model
from tests.tiny_models import TinyData

CPU = torch.device("cpu")


def test_rows_without_a_token_and_special_tokens_are_left_out(tiny: TinyData, tmp_path: Path) -> None:
    model = make_model("roberta", tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM, vocab_size=VOCABULARY + 8)
    tokenizer = HuggingFaceTokenizer(model)
    masked_tokens = MaskedTokens(model, tokenizer, CPU)
    assert tokenizer.mask_id is not None
    (everything,) = masked_tokens.predicted([tokenizer.mask_id], VOCABULARY + 8)
    assert len(everything) == VOCABULARY - 5
    assert [value for _, value in everything] == sorted((value for _, value in everything), reverse=True)
    assert masked_tokens.predicted([7, 8], 3) == []
    assert len(masked_tokens.predicted([tokenizer.mask_id, 7, tokenizer.mask_id], 3)) == 2


def test_an_encoder_alone_has_none(tiny: TinyData, tmp_path: Path) -> None:
    model = make_model("bert", tiny.text, tmp_path / "model")
    with pytest.raises(ValueError, match="lacks"):
        MaskedTokens(model, HuggingFaceTokenizer(model), CPU)


def test_steering_does_not_reach_other_threads(tiny: TinyData, tmp_path: Path) -> None:
    model = make_model("bert", tiny.text, tmp_path / "model", kind=AutoModelForMaskedLM)
    tokenizer = HuggingFaceTokenizer(model)
    assert tokenizer.mask_id is not None
    masked_tokens = MaskedTokens(model, tokenizer, CPU)
    ids = [7, tokenizer.mask_id, 9]
    direction = torch.nn.functional.normalize(torch.arange(32.0), dim=0)
    steer = partial(masked_tokens.steered, ids, 3, layer=1, direction=direction, strength=2.0)
    plain = masked_tokens.predicted(ids, 3)
    steered = steer()
    assert steered != plain
    with ThreadPoolExecutor(4) as pool:
        both = [(pool.submit(masked_tokens.predicted, ids, 3), pool.submit(steer)) for _ in range(100)]
        for first, second in both:
            assert (first.result(), second.result()) == (plain, steered)
