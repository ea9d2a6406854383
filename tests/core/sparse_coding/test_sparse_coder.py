"""What the protocol of coders demands and what it gives by itself."""

from __future__ import annotations

import numpy as np
import pytest

from mlsm_plugin.core.sparse_coding.sparse_coder import NoOptions, SparseCoder, SparseCodes
from tests.core.sparse_coding.threshold_coder import ThresholdCoder

REQUIRED = ("num_atoms", "dim", "fingerprint", "encode", "save", "load")


@pytest.mark.parametrize("name", REQUIRED)
def test_a_coder_without_one_of_its_parts_cannot_be_made(name: str) -> None:
    parts = {part: vars(ThresholdCoder)[part] for part in ("__init__", *REQUIRED) if part != name}
    incomplete = type("Incomplete", (SparseCoder,), {"kind": "incomplete", **parts})
    with pytest.raises(TypeError, match=name):
        incomplete(np.eye(3), {})
    complete = type("Complete", (SparseCoder,), {**parts, name: vars(ThresholdCoder)[name]})
    assert complete(np.eye(3), {}).num_atoms == 3


def test_what_a_coder_has_that_says_no_more() -> None:
    coder = ThresholdCoder(np.eye(3), {"layer": 2})
    assert coder.settings() == {"coder": "threshold"}
    assert coder.has_gaps is False
    assert SparseCoder.options_type is NoOptions
    assert NoOptions() == NoOptions()
    coder.check()
    coded = coder.encode(np.eye(3))
    assert coded.gap is None
    assert coder.inexact(coded) is None
    assert "use a coder that was learned from these hidden states" in coder.why_empty(np.zeros((2, 3)))


def test_codes_without_an_objective_have_no_gap() -> None:
    codes = ThresholdCoder(np.eye(2), {}).encode(np.eye(2)).codes
    assert SparseCodes(codes).gap is None
    assert SparseCodes(codes, np.zeros(2)).gap is not None
