"""Codes of masked tokens that are computed at once, compared with the stored ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.core.machine import devices
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SaeWeights, SparseAutoencoder
from mlsm_plugin.core.sparse_coding.stored_codes import padded_distributions, strongest
from mlsm_plugin.fairseq_plugin.coding.online_codes import OnlineCodes
from tests.changed_dictionary import changed_dictionary
from tests.conftest import Pipeline
from tests.tiny_run import batches, training_config

PAD = 1


def online_codes(pipeline: Pipeline, lambda_: float | None = None, **changes: Any) -> OnlineCodes:
    settings = {"checkpoint": pipeline.auxiliary, "dictionary": pipeline.dictionary, "tokens_per_sample": 64}
    settings["fp16"] = False  # as the stored codes
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
    "flags", [(), ("--random-token-prob", 0.4, "--mask-prob", 0.3), ("--latent-top", 3)], ids=["", "random", "top"]
)
def test_online_targets_are_the_stored_ones(pipeline: Pipeline, flags: tuple[object, ...]) -> None:
    top = 3 if "--latent-top" in flags else None
    online = online_codes(pipeline, latent_top=top)
    compared = ties = 0
    for batch in batches(training_config(pipeline.data_bin, *flags), "valid"):
        if batch["net_input"]["src_tokens"].size(1) > 64:  # training drops it, coding cuts it
            continue
        found = online.codes_of_masked(batch["net_input"]["src_tokens"], batch["target"])
        stored_codes = {name: batch["codes"][name] for name in ("atoms", "weights")}
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            name: tensor.dtype for name, tensor in stored_codes.items()
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
    assert compared > 300
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


def test_products_are_in_bfloat16_where_the_device_is_fast_in_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batches(training_config(pipeline.data_bin), "valid")[0]
    words = (batch["net_input"]["src_tokens"], batch["target"])
    for fast in (False, True):
        monkeypatch.setattr(devices, "has_fast_bf16", lambda device, fast=fast: fast)
        expected, found = (online_codes(pipeline, fp16=fp16).codes_of_masked(*words) for fp16 in (fast, None))
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.fixture(scope="module")
def top_4(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a TopK SAE of the shared atoms."""
    dictionary = AtomDictionary.load(pipeline.dictionary)
    atoms = torch.from_numpy(dictionary.atoms)
    bias = torch.full((48,), -2.5)  # so that some of the four are 0
    weights = SaeWeights(atoms, bias, atoms, torch.zeros(atoms.size(1)))
    folder, config = tmp_path_factory.mktemp("top_4"), SaeConfig("topk", k=4, input_norm="constant_norm")
    SaeCoder(SparseAutoencoder(config, weights), {"layer": dictionary.meta["layer"]}).save(folder)
    return folder


@pytest.mark.parametrize("top", [None, 3])
def test_codes_of_topk_are_those_of_the_store(pipeline: Pipeline, top_4: Path, top: int | None) -> None:
    online = online_codes(pipeline, dictionary=top_4, latent_top=top)
    batch = batches(training_config(pipeline.data_bin), "valid")[0]
    target, masked = batch["target"], batch["target"].ne(PAD)
    original = torch.where(masked, target, batch["net_input"]["src_tokens"])
    target[0, 0] = original[0, 0]  # BOS
    found = online.codes_of_masked(batch["net_input"]["src_tokens"], target)
    assert ((found["atoms"] < 0) == (found["weights"] == 0)).all()
    hidden = online.load_encoder().hidden_states(original)[target.ne(PAD)]
    codes = strongest(online.coder.encode(hidden).codes, top)
    atoms, weights = (torch.from_numpy(part) for part in padded_distributions(codes))
    expected = dense({"atoms": atoms, "weights": weights})
    expected[0] = 0
    assert 0 < (expected > 0).sum() < len(hidden) * (top or 4) - (top or 4)
    torch.testing.assert_close(dense(found), expected, rtol=0, atol=1e-3)


def test_topk_that_finds_nothing_is_refused(pipeline: Pipeline, top_4: Path, tmp_path: Path) -> None:
    silent = shutil.copytree(top_4, tmp_path / "silent")
    np.save(silent / "encoder_bias.npy", np.full(48, -1e3, np.float32))
    tokens, target = torch.tensor([[0, 5, 6, 2]]), torch.tensor([[1, 5, 1, 1]])
    online = online_codes(pipeline, dictionary=silent)
    with pytest.raises(ValueError, match="the codes of all 32 masked tokens of a batch are empty"):
        online.codes_of_masked(tokens.repeat(32, 1), target.repeat(32, 1))
    assert (online.codes_of_masked(tokens, target)["atoms"] == -1).all()


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
