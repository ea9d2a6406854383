"""Codes, their text and their model are opened together, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.huggingface.coded_text import open_coded_text
from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.huggingface.coded_model import CodedModel
from tests.tiny_hf_models import make_model


def test_codes_of_the_first_sequences(coded: CodedModel, codes: Path, tmp_path: Path) -> None:
    text = TokenSequences(coded.tokens)
    more = [text[index] for index in range(len(text))] + [np.array([2, 5, 3])]
    TokenSequences.write(tmp_path / "longer", more, about=text.about)
    coded_text = open_coded_text(codes, tmp_path / "longer", f"hf:{coded.model}")
    assert coded_text.model == str(coded.model)
    assert coded_text.text.num_tokens == text.num_tokens == len(coded_text.codes)
    assert coded_text.text.fingerprint == text.fingerprint


def test_what_does_not_belong_together_is_refused(coded: CodedModel, codes: Path, tmp_path: Path) -> None:
    other = make_model("bert", coded.text, tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(ValueError, match="the codes are of another model"):
        open_coded_text(codes, coded.tokens, other)
    text = TokenSequences(coded.tokens)
    in_reverse = [text[index] for index in reversed(range(len(text)))]
    TokenSequences.write(tmp_path / "reversed", in_reverse)
    with pytest.raises(ValueError, match="were made from another text"):
        open_coded_text(codes, tmp_path / "reversed", coded.model)
