"""Labels of atoms: the tokens that tell most, in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse as sp

from mlsm_plugin.core.text.hf_tokenizer import HuggingFaceTokenizer
from mlsm_plugin.search.labels import labels_of, token_weights


def test_weights_are_summed_by_token() -> None:
    codes = sp.csr_matrix([[1.0, 0.0], [0.5, 2.0], [0.25, 0.0]])
    weights = token_weights(np.array([3, 1, 3]), codes, 5)
    assert weights.toarray().tolist() == [[0, 0.5, 0, 1.25, 0], [0, 2, 0, 0, 0]]


def test_a_label_has_the_tokens_that_the_atom_has_more_than_others(hf_tokenizers: dict[str, Path]) -> None:
    tokenizer = HuggingFaceTokenizer(hf_tokenizers["byte_level"])
    numbers = [tokenizer.ids_of(f" {word}")[0] for word in ("the", "is", "of")]
    weights = np.zeros((3, tokenizer.largest_id + 1))
    weights[0, numbers[0]] = weights[1, numbers[0]] = 5.0
    weights[1, numbers[1:]] = 4.0, 3.0
    labels = labels_of(sp.csr_matrix(weights), tokenizer)
    assert labels[0] == "the"
    assert labels[1].split(", ")[:2] == ["is", "of"]
    assert labels[2] == ""
