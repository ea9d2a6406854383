"""An auxiliary model, a coder and blocks that do not belong together are refused before anything is coded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin.core.coding.coder_fit import check_sample_length, check_width, fitting_encoder, fitting_fingerprint
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.lasso import LassoCoder
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.core.coding.toy_coder import ToyCoder
from tests.tiny_models import POSITIONS, TinyData

ONE = "1" * 64


def test_coder_of_the_model_and_layer_fits_and_one_that_says_nothing(tiny: TinyData) -> None:
    own = FairseqEncoder.fingerprint_of(tiny.model)
    for coder, layer in ((ToyCoder(), 7), (ToyCoder(auxiliary_fingerprint=own, layer=2), 2), (ToyCoder(layer=0), 0)):
        assert fitting_fingerprint(tiny.model, coder, layer) == own


def test_coder_of_another_model_or_layer_is_refused(tiny: TinyData) -> None:
    own = FairseqEncoder.fingerprint_of(tiny.model)
    message = "the dictionary was learned from another auxiliary checkpoint (SHA-256 111111111111) than the given one"
    with pytest.raises(ValueError, match=re.escape(f"{message} ({own[:12]}); pass that checkpoint, or learn")):
        fitting_fingerprint(tiny.model, ToyCoder(auxiliary_fingerprint=ONE, layer=2), 2)
    with pytest.raises(ValueError, match="the dictionary was learned from layer 2, not from --layer 1"):
        fitting_fingerprint(tiny.model, ToyCoder(auxiliary_fingerprint=own, layer=2), 1)
    with pytest.raises(ValueError, match="learned from layer 0, not from --layer 1"):
        fitting_fingerprint(tiny.model, ToyCoder(layer=0), 1)


def test_width_and_positions_of_the_model_are_compared(tiny: TinyData) -> None:
    encoder = FairseqEncoder(tiny.model, tiny.data_bin, layer=1, device="cpu")
    check_width(encoder, ToyCoder(32))
    check_sample_length(encoder, POSITIONS)
    with pytest.raises(ValueError, match="dictionary is 16 wide, the hidden states of the auxiliary model are 32 wide"):
        check_width(encoder, ToyCoder(16))
    too_long = f"--tokens-per-sample {POSITIONS + 1} is more than the {POSITIONS} positions of the auxiliary model"
    with pytest.raises(ValueError, match=too_long):
        check_sample_length(encoder, POSITIONS + 1)


def test_fingerprint_is_given_only_where_all_fits(tiny: TinyData, tmp_path: Path) -> None:
    expected = FairseqEncoder.fingerprint_of(tiny.model)
    assert fitting_fingerprint(tiny.model, ToyCoder(auxiliary_fingerprint=expected, layer=1), 1) == expected
    with pytest.raises(ValueError, match="another auxiliary checkpoint"):
        fitting_fingerprint(tiny.model, ToyCoder(auxiliary_fingerprint=ONE), 1)
    with pytest.raises(FileNotFoundError, match=r"absent\.pt does not exist"):
        fitting_fingerprint(tmp_path / "absent.pt", ToyCoder(), 1)
    with pytest.raises(ValueError, match="the prefix nosuch: is not known"):
        fitting_fingerprint("nosuch:model", ToyCoder(), 1)
    twins = LassoCoder(AtomDictionary(np.eye(32, dtype=np.float32)[[4, 5, 4]], {"layer": 1, "lambda": 0.1}))
    with pytest.raises(ValueError, match="atoms 0 and 2 of the dictionary are identical"):
        fitting_fingerprint(tiny.model, twins, 1)


def test_opened_model_fits(tiny: TinyData) -> None:
    def opened(coder: ToyCoder, tokens_per_sample: int) -> FairseqEncoder:
        settings = CodingSettings(2, BlockSettings(tokens_per_sample), device="cpu")
        return fitting_encoder(tiny.model, tiny.data_bin, coder, settings)  # type: ignore[return-value]

    assert (opened(ToyCoder(), POSITIONS).layer, opened(ToyCoder(), 8).dim) == (2, 32)
    with pytest.raises(ValueError, match="16 wide"):
        opened(ToyCoder(16), 8)
    with pytest.raises(ValueError, match="--tokens-per-sample 64"):
        opened(ToyCoder(), 64)
