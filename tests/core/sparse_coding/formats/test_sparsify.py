"""SAEs of sparsify: their latents, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.core.sparse_coding.formats.sparsify import read_sparsify
from tests.core.sparse_coding.formats.foreign_saes import (
    DIM,
    LATENTS,
    SPARSIFY_CONFIG,
    hidden_states,
    sparsify_arrays,
    write_sparsify,
)


def oracle(own: dict[str, np.ndarray], k: int, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    latents = np.zeros((len(hidden), LATENTS))
    for row, x in enumerate(hidden.astype(np.float64)):
        pairs = zip(own["encoder.weight"], own["encoder.bias"], strict=True)
        values = [max(float(weight @ (x - own["b_dec"]) + bias), 0) for weight, bias in pairs]
        for atom in sorted(range(LATENTS), key=lambda atom: -values[atom])[:k]:
            latents[row, atom] = values[atom]
    return latents, latents @ own["W_dec"] + own["b_dec"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 4, LATENTS])
def test_latents_are_those_of_the_formula(k: int, dtype: torch.dtype, tmp_path: Path) -> None:
    own = write_sparsify(tmp_path / "layers.5", {**SPARSIFY_CONFIG, "k": k}, dtype=dtype)
    coder, hidden = read_sparsify(tmp_path / "layers.5"), hidden_states()
    latents, reconstructions = oracle(own, k, hidden)
    codes = coder.encode(hidden).codes
    assert np.allclose(codes.toarray(), latents, atol=1e-5)
    assert np.allclose(coder.reconstruct(hidden, codes), reconstructions, atol=1e-5)
    assert coder.meta["imported_from"] == {"format": "sparsify", "hookpoint": "layers.5"}


def test_older_files_give_a_multiple_of_the_width(tmp_path: Path) -> None:
    arrays = sparsify_arrays()
    tall = {name: np.concatenate([array] * 3)[:18] for name, array in arrays.items() if name != "b_dec"}
    config = {"expansion_factor": 3, "normalize_decoder": True, "num_latents": 0, "k": 2, "d_in": DIM, "signed": False}
    write_sparsify(tmp_path, config, {**tall, "b_dec": arrays["b_dec"]})
    assert read_sparsify(tmp_path).num_atoms == 18


@pytest.mark.parametrize(
    ("settings", "arrays", "problem"),
    [
        ({"transcode": True}, {}, "transcode is refused: a transcoder"),
        ({"skip_connection": True}, {}, "skip_connection is refused"),
        ({"signed": True}, {}, "signed is refused: its latents can be negative"),
        ({"activation": "groupmax"}, {}, "groupmax is refused"),
        ({"activation": "relu"}, {}, '"relu" is not one of'),
        ({"transcode": "yes"}, {}, "neither true nor false"),
        ({"k": -1}, {}, "k: -1 is not a whole number"),
        ({"k": 99}, {}, "only 20 latents"),
        ({"d_in": DIM + 1}, {}, r"the encoder is \(20, 6\) .*, but the settings say \(20, 7\)"),
        ({"num_latents": 0}, {}, r"the settings say \(192, 6\)"),
        ({"negative_slope": 1}, {}, "does not know .'negative_slope'"),
        ({}, {"W_skip": np.zeros((DIM, DIM), np.float32)}, "W_skip is refused"),
        ({}, {"encoder.bias": None}, "lacks the tensor encoder.bias"),
        ({}, {"W_dec": np.zeros((DIM, LATENTS), np.float32)}, "decoder has the shape"),
        ({}, {"b_dec": np.full(DIM, np.inf, np.float32)}, "decoder_bias holds NaN or infinity"),
        ({}, {"other": np.zeros(3, np.float32)}, "do not belong to this kind of SAE: other"),
    ],
)
def test_what_is_refused_and_why(
    settings: dict[str, Any], arrays: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    changed = {**sparsify_arrays(), **arrays}
    kept = {name: array for name, array in changed.items() if array is not None}
    write_sparsify(tmp_path, {**SPARSIFY_CONFIG, **settings}, kept)
    with pytest.raises(ValueError, match=problem) as caught:
        read_sparsify(tmp_path)
    assert str(tmp_path) in str(caught.value)
