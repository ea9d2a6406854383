"""The tokens that tell most about an atom, against a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp

from mlsm_plugin.core.sparse_coding.telling_tokens import telling_tokens


def test_a_token_that_is_everywhere_tells_less_than_its_weight() -> None:
    weights = sp.csr_matrix(np.array([[6.0, 3.0, 0.0], [90.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
    first, second, empty = telling_tokens(weights, 2)
    assert first[0].tolist() == [1, 0]
    assert second[0].tolist() == [0, 2]
    assert empty[0].tolist() == []


def test_values_are_parts_of_the_divergence() -> None:
    weights = np.random.default_rng(0).random((5, 9)) * (np.random.default_rng(1).random((5, 9)) < 0.7)
    for atom, (tokens, values) in enumerate(telling_tokens(sp.csr_matrix(weights), 9)):
        assert values.tolist() == sorted(values, reverse=True)
        for token, value in zip(tokens.tolist(), values.tolist(), strict=True):
            share = weights[atom, token] / weights[atom].sum()
            overall = weights[:, token].sum() / weights.sum()
            assert value == pytest.approx(share * math.log(share / overall))
