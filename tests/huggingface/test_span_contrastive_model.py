"""NPM for the library's encoders; test_same_losses compares it with fairseq's criterion."""

from __future__ import annotations

import pytest

from mlsm_plugin.huggingface.pretraining_model import SpanContrastiveModel
from tests.huggingface.tiny_corpus import tiny_bert


def test_options_out_of_range_are_one_line() -> None:
    with pytest.raises(ValueError, match="similarity must be one of inner, l2"):
        SpanContrastiveModel.of(tiny_bert(), similarity="cosine")
    with pytest.raises(ValueError, match="temperature must be positive"):
        SpanContrastiveModel.of(tiny_bert(), temperature=0)
