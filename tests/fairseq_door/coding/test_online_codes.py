"""Codes of masked tokens that are computed at once, compared with the stored ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.fairseq_door.coding.online_codes import OnlineCodes, padded_distributions
from tests.changed_dictionary import changed_dictionary
from tests.conftest import Pipeline
from tests.tiny_run import batches, training_config

PAD = 1


def online_codes(pipeline: Pipeline, lambda_: float | None = None, **changes: Any) -> OnlineCodes:
    settings = {"checkpoint": pipeline.auxiliary, "dictionary": pipeline.dictionary, "tokens_per_sample": 64}
    settings["coder_options"] = {} if lambda_ is None else {"lambda_": lambda_}
    return OnlineCodes(pipeline.data_bin, **{**settings, **changes})


def dense(codes: dict[str, torch.Tensor]) -> torch.Tensor:
    """``(n, 48)`` float64 distributions."""
    rows = torch.zeros(len(codes["atoms"]), 49, dtype=torch.float64)
    rows.scatter_(1, codes["atoms"].long() % 49, codes["weights"].double())  # padding, -1, to the last column
    return rows[:, :48]


def rows_with_a_tie_for_the_last_atom(ours: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Which rows differ only in an atom that weighs as little as the last one that is kept, ``(n,)`` bool."""
    last = torch.where(stored > 0, stored, torch.inf).min(dim=1).values
    differs = (ours - stored).abs() > 2e-3
    as_light = ((torch.maximum(ours, stored) - last[:, None]).abs() <= 1e-3) | ~differs
    same_weights = (ours.sort(dim=1).values - stored.sort(dim=1).values).abs().sum(dim=1) <= 2e-3
    return differs.any(dim=1) & as_light.all(dim=1) & same_weights


@pytest.mark.parametrize(
    "flags",
    [(), ("--random-token-prob", 0.4, "--mask-prob", 0.3), ("--latent-top", 3)],
    ids=["", "random", "top"],
)
def test_online_targets_are_the_stored_ones(pipeline: Pipeline, flags: tuple[object, ...]) -> None:
    top = 3 if "--latent-top" in flags else None
    online = online_codes(pipeline, latent_top=top)
    compared = empty = ties = 0
    for batch in batches(training_config(pipeline.data_bin, *flags), "valid"):
        if batch["net_input"]["src_tokens"].size(1) > 64:  # training drops it, coding cuts it
            continue
        found = online.codes_of_masked(batch["net_input"]["src_tokens"], batch["target"])
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            name: tensor.dtype for name, tensor in batch["codes"].items()
        }
        assert top is None or found["atoms"].shape[1] == top
        ours, stored = dense(found), dense(batch["codes"])
        assert ours.shape == stored.shape
        if top is not None:
            tied = rows_with_a_tie_for_the_last_atom(ours, stored)
            ties += int(tied.sum())
            ours, stored = ours[~tied], stored[~tied]
        assert ((ours - stored).abs().sum(dim=1) <= 2e-3).all()
        assert torch.equal(ours.sum(dim=1) > 0, stored.sum(dim=1) > 0)
        assert ((stored < 0.01) | (ours > 0)).all()
        assert ((ours < 0.01) | (stored > 0)).all()
        compared += int((stored.sum(dim=1) > 0).sum())
        empty += int((stored.sum(dim=1) == 0).sum())
    assert compared > 300
    assert empty > 5  # masked BOS and EOS
    assert ties <= 3


def test_batches_without_masks_or_with_masked_special_symbols_only(pipeline: Pipeline) -> None:
    online = online_codes(pipeline)
    tokens = torch.tensor([[0, 5, 6, 2], [0, 7, 2, 1]])
    nothing = online.codes_of_masked(tokens, torch.full_like(tokens, PAD))
    assert nothing["atoms"].shape == nothing["weights"].shape == (0, 0)
    target = torch.tensor([[0, 1, 1, 1], [1, 1, 2, 1]])
    special = online.codes_of_masked(tokens, target)
    assert special["atoms"].shape == special["weights"].shape == (2, 0)
    target[0, 2] = 6
    mixed = online.codes_of_masked(tokens, target)
    assert mixed["weights"].gt(0).any(dim=1).tolist() == [False, True, False]
    assert (mixed["atoms"][0] == -1).all()
    assert float(mixed["weights"].float().sum()) == pytest.approx(1, abs=2e-3)


def test_padded_rows_hold_what_the_store_would() -> None:
    from scipy import sparse

    codes = np.array([[0, 2, 0, 6], [0, 0, 0, 0], [1, 0, 1e-9, 0]], dtype=np.float32)
    atoms, weights = padded_distributions(sparse.csr_matrix(codes))
    np.testing.assert_array_equal(atoms, [[1, 3], [-1, -1], [0, -1]])
    np.testing.assert_array_equal(weights, [[0.25, 0.75], [0, 0], [1, 0]])
    assert (atoms.dtype, weights.dtype) == (np.int32, np.float16)


def test_half_precision_is_close(pipeline: Pipeline) -> None:
    batch = batches(training_config(pipeline.data_bin), "valid")[0]
    words = (batch["net_input"]["src_tokens"], batch["target"])
    exact, rounded = (dense(online_codes(pipeline, fp16=fp16).codes_of_masked(*words)) for fp16 in (False, True))
    distance = (exact - rounded).abs().sum(dim=1)
    assert 0 < float(distance.mean()) < 0.05


def test_settings_default_to_those_of_the_dictionary(pipeline: Pipeline, tmp_path: Path) -> None:
    meta = json.loads((pipeline.dictionary / "meta.json").read_text())
    online = online_codes(pipeline)
    assert (online.settings.layer, online.coder.settings()["lambda"]) == (meta["layer"], meta["lambda"])
    tokens, target = torch.tensor([[0, 5, 6, 2]]), torch.tensor([[1, 5, 1, 1]])
    nonzeros = [
        int(online_codes(pipeline, lambda_=value).codes_of_masked(tokens, target)["weights"].gt(0).sum())
        for value in (0.001, None, 0.8)
    ]
    assert nonzeros[0] >= nonzeros[1] > nonzeros[2]
    silent = changed_dictionary(pipeline, tmp_path / "silent", layer=None, auxiliary_fingerprint=None)
    with pytest.raises(ValueError, match="does not say its layer; pass --latent-layer"):
        online_codes(pipeline, dictionary=silent)
    first = online_codes(pipeline, dictionary=silent, layer=1)
    assert first.load_encoder().layer == 1
    with pytest.raises(ValueError, match=r"lambda 1\.5 is too large: the largest correlation"):
        online_codes(pipeline, lambda_=1.5).codes_of_masked(tokens.repeat(32, 1), target.repeat(32, 1))
    with pytest.raises(ValueError, match="lambda_ must be positive, got 0"):
        online_codes(pipeline, lambda_=0)
