"""``mlsm evaluate dictionary`` for a lasso dictionary and an SAE, with and without a masked-LM head; and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlsm_plugin.core.sparse_coding.coder import load_coder
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from mlsm_plugin.core.sparse_coding.encode import normalize_rows
from mlsm_plugin.core.sparse_coding.sae_coder import SaeCoder
from mlsm_plugin.core.sparse_coding.sparse_autoencoder import SaeConfig, SparseAutoencoder
from mlsm_plugin.fairseq_plugin.coding.fairseq_encoder import FairseqEncoder
from tests.conftest import failing_mlsm, mlsm
from tests.core.sparse_coding.sae_weights import random_weights
from tests.hub.modern_models import NPM
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData, positions, save_untrained

Capture = pytest.CaptureFixture[str]
BLOCKS = {"tokens_per_sample": 24, "sample_break_mode": "complete"}
SMALL = ("--max-tokens", 400, "--batch-tokens", 200, "--threads", 1)


def origin(tiny: TinyData, layer: int = 1) -> dict[str, Any]:
    return {"layer": layer, "blocks": BLOCKS, "auxiliary_fingerprint": FairseqEncoder.fingerprint_of(tiny.model)}


def save_lasso(tiny: TinyData, folder: Path) -> Path:
    atoms = normalize_rows(np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32))
    AtomDictionary(atoms, {**origin(tiny), "lambda": 0.1}).save(folder)
    return folder


def save_sae(tiny: TinyData, folder: Path, **meta: Any) -> Path:
    config = SaeConfig(activation="topk", k=5)
    SaeCoder(SparseAutoencoder(config, random_weights(config, 40, 32)), {**origin(tiny), **meta}).save(folder)
    return folder


@pytest.mark.parametrize("save", [save_lasso, save_sae])
def test_figures_are_printed_and_written(tiny: TinyData, tmp_path: Path, capsys: Capture, save: Any) -> None:
    folder = save(tiny, tmp_path / "dictionary")
    words = ("evaluate", "dictionary", folder, tiny.data_bin, "--auxiliary", tiny.model, *SMALL)
    mlsm(*words, "--output", tmp_path / "out.json")
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    coder = load_coder(folder)
    assert found["dictionary"] == {
        "fingerprint": coder.fingerprint, "n_atoms": coder.num_atoms, **coder.settings()
    }  # fmt: skip
    expected = {"layer": 1, "split": "valid", "seed": 1, "blocks": BLOCKS, "why_no_loss": None, "inexact_codes": 0}
    assert {name: found[name] for name in expected} == expected
    assert found["auxiliary_fingerprint"] == FairseqEncoder.fingerprint_of(tiny.model)
    quality, loss = found["reconstruction"], found["loss"]
    assert 350 < quality["tokens"] < 500
    assert (loss["ablation"], loss["masked_share"]) == ("zero", 0.15)
    score = (loss["ce_loss_with_ablation"] - loss["ce_loss_with_sae"]) / (
        loss["ce_loss_with_ablation"] - loss["ce_loss_without_sae"]
    )
    assert loss["ce_loss_score"] == pytest.approx(score, rel=1e-6)
    for name, value in (*quality.items(), *loss.items()):
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        assert re.search(rf"^{name} +{re.escape(shown)}$", printed, flags=re.M), name
    mlsm(*words, "--output", tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "out.json").read_bytes()
    mlsm(*words, "--seed", 2, "--output", tmp_path / "other.json")
    assert json.loads((tmp_path / "other.json").read_text())["loss"] != loss


def test_lambda_and_layer_can_be_chosen(tiny: TinyData, tmp_path: Path) -> None:
    folder = save_lasso(tiny, tmp_path / "dictionary")
    l0 = []
    for lambda_ in (0.1, 0.4):
        words = (folder, tiny.data_bin, "--auxiliary", tiny.model, *SMALL, "--lambda", lambda_)
        mlsm("evaluate", "dictionary", *words, "--output", tmp_path / "out.json")
        found = json.loads((tmp_path / "out.json").read_text())
        assert found["dictionary"]["lambda"] == lambda_
        l0.append(found["reconstruction"]["l0"])
    assert l0[0] > l0[1] > 0


def test_codes_that_miss_the_tolerance_are_said(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    folder = save_lasso(tiny, tmp_path / "dictionary")
    words = (folder, tiny.data_bin, "--auxiliary", tiny.model, *SMALL, "--tolerance", 1e-30)
    mlsm("evaluate", "dictionary", *words, "--output", tmp_path / "out.json")
    missed = json.loads((tmp_path / "out.json").read_text())["inexact_codes"]
    assert missed > 100
    assert f"mlsm: warning: {missed} codes do not reach --tolerance" in capsys.readouterr().err


def test_a_model_without_a_trained_head_gives_reconstructions_only(
    tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    model = save_untrained(tiny.data_bin, tmp_path / "npm", *positions(40), **NPM)
    sae = save_sae(tiny, tmp_path / "sae", auxiliary_fingerprint=None)
    words = (sae, tiny.data_bin, "--auxiliary", model, *SMALL, "--output", tmp_path / "out.json")
    mlsm("evaluate", "dictionary", *words)
    found = json.loads((tmp_path / "out.json").read_text())
    why = "the masked-LM head of this model was not trained (--task nonparametric_masked_lm has no loss on it)"
    assert (found["loss"], found["why_no_loss"]) == (None, why)
    assert found["reconstruction"]["l0"] > 0
    assert f"no masked-LM loss: {why}" in capsys.readouterr().out


def test_a_library_model_without_a_head_gives_reconstructions_only(
    english_text: tuple[Path, Path], tiny: TinyData, tmp_path: Path, capsys: Capture
) -> None:
    folder = make_model("roberta", english_text[0], tmp_path / "model")
    texts = ("--train", english_text[1], "--valid", english_text[1])
    mlsm("binarize", "--tokenizer", f"hf:{folder}", *texts, "--output", tmp_path / "data", "--workers", 1)
    sae = save_sae(tiny, tmp_path / "sae", auxiliary_fingerprint=None)
    words = (sae, tmp_path / "data", "--auxiliary", f"hf:{folder}", *SMALL, "--output", tmp_path / "out.json")
    mlsm("evaluate", "dictionary", *words)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["loss"] is None
    assert "without a masked-LM head (it lacks weights such as lm_head" in found["why_no_loss"]
    assert found["reconstruction"]["explained_variance"] < 1


def test_what_does_not_belong_together_is_refused(tiny: TinyData, tmp_path: Path, capsys: Capture) -> None:
    folder = save_sae(tiny, tmp_path / "sae")

    def refused(*words: object, dictionary: Path = folder) -> str:
        common = ("--auxiliary", tiny.model, "--output", tmp_path / "out.json")
        line = failing_mlsm(capsys, "evaluate", "dictionary", dictionary, tiny.data_bin, *common, *words)
        assert not (tmp_path / "out.json").exists()
        return line

    assert "was learned from layer 1, not from --layer 2" in refused("--layer", 2)
    assert "--max-tokens must be positive, got 0" in refused("--max-tokens", 0)
    assert "--seed must be at least 0 and below 2^63, got -1" in refused("--seed", -1)
    assert "no binarized split at" in refused("--split", "test")
    assert "holds no meta.json" in refused(dictionary=tmp_path)
    assert "is more than the 32 positions of the auxiliary model" in refused("--tokens-per-sample", 33)
    assert "the dictionary does not have" in refused("--lambda", 0.1) or "lambda" in refused("--lambda", 0.1)
    other = save_sae(tiny, tmp_path / "other", auxiliary_fingerprint="0" * 64)
    assert "was learned from another auxiliary checkpoint" in refused(dictionary=other)
    unknown = save_sae(tiny, tmp_path / "unknown", layer=None)
    assert "does not say its layer; pass --layer" in refused(dictionary=unknown)
    narrow = SaeConfig()
    SaeCoder(SparseAutoencoder(narrow, random_weights(narrow, 8, 16)), origin(tiny)).save(tmp_path / "narrow")
    assert "is 16 wide, the hidden states of the auxiliary model are 32 wide" in refused(dictionary=tmp_path / "narrow")
    huge = SaeConfig()
    weights = random_weights(huge, 8, 32)
    weights = weights._replace(decoder=torch.full_like(weights.decoder, 3e38))
    SaeCoder(SparseAutoencoder(huge, weights), origin(tiny)).save(tmp_path / "huge")
    assert re.search(r"the reconstruction of row \d+ holds NaN or inf", refused(dictionary=tmp_path / "huge"))
    missing = failing_mlsm(
        capsys,
        "evaluate",
        "dictionary",
        folder,
        tiny.data_bin,
        "--auxiliary",
        tiny.model,
        "--output",
        tmp_path / "no/x",
    )
    assert "does not exist; make it, or choose another place" in missing
