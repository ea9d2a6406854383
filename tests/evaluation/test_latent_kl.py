"""The KL divergence of a model and of the unigram baseline on the same masked tokens."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import tasks

from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.evaluation import latent_kl
from mlsm_plugin.evaluation.latent_kl import UNSEEN, LatentKl, evaluate_latent_kl, mean_code
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockSettings
from mlsm_plugin.fairseq_plugin.coding.corpus_coding import encode_split
from mlsm_plugin.fairseq_plugin.compat.model_parts import ATOM_PROJECTION
from tests.core.coding.toy_coder import ToyCoder
from tests.core.sparse_coding.code_stores import BOUNDARIES, expected_rows, random_codes, write_store
from tests.tiny_models import TinyData, save_model
from tests.tiny_run import seeded_model, training_config


def test_mean_code_is_that_of_all_rows_whatever_is_read_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    codes = random_codes(1, 10)
    store = CodeStore(write_store(tmp_path / "codes", codes, BOUNDARIES))
    total = expected_rows(codes).astype(np.float64).sum(axis=0)
    expected = total / total.sum() + UNSEEN
    found = mean_code(store)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-5)
    assert (found > 0).all()
    assert found.sum() == pytest.approx(1)
    monkeypatch.setattr(latent_kl, "ROWS_AT_ONCE", 3)
    np.testing.assert_allclose(mean_code(store), found, rtol=1e-12)


def test_mean_code_of_the_strongest_atoms_is_that_of_the_targets(tmp_path: Path) -> None:
    store = CodeStore(write_store(tmp_path / "codes", random_codes(1, 10), BOUNDARIES))
    total = np.zeros(40)
    for row in store.rows(0, 10).toarray().astype(np.float64):
        row[np.argsort(-row, kind="stable")[2:]] = 0
        total += row / max(row.sum(), 1e-9)
    expected = total / total.sum() + UNSEEN
    found = mean_code(store, 2)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-3)  # of float16
    assert np.abs(found - mean_code(store)).max() > 0.01


@pytest.fixture(scope="module")
def coded(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tiny.copy(tmp_path_factory.mktemp("coded") / "data-bin")
    settings = CodingSettings(layer=1, blocks=BlockSettings(24))
    for split in ("train", "valid"):
        encode_split(data, split, auxiliary=tiny.model, coder=ToyCoder(), settings=settings)
    return data


def saved(coded: Path, folder: Path, logits: np.ndarray, positions: int = 24, flags: tuple[object, ...] = ()) -> Path:
    """A model that says ``logits`` of every token."""
    cfg = training_config(coded, "--tokens-per-sample", 24, "--max-positions", positions, *flags)
    model = seeded_model(cfg, tasks.setup_task(cfg.task))
    state = model.state_dict()
    state[f"{ATOM_PROJECTION}weight"].zero_()
    state[f"{ATOM_PROJECTION}bias"].copy_(torch.from_numpy(logits))
    return save_model(cfg, model, folder, coded).parent


def test_model_that_says_the_mean_code_is_the_baseline(coded: Path, tmp_path: Path) -> None:
    mean = np.log(mean_code(CodeStore(str(coded / "train.codes"))))
    same = evaluate_latent_kl(saved(coded, tmp_path / "same", mean), coded)
    assert same.num_tokens > 300
    assert same.model == pytest.approx(same.unigram, rel=1e-5)
    again = evaluate_latent_kl(tmp_path / "same", coded, batch_size=7)
    assert again == LatentKl(*(pytest.approx(value, rel=1e-5) for value in (same.model, same.unigram)), same.num_tokens)
    flat = evaluate_latent_kl(saved(coded, tmp_path / "flat", np.zeros_like(mean)), coded)
    assert flat.unigram == pytest.approx(same.unigram, rel=1e-6)
    assert flat.model > same.unigram + 1e-3  # the mean code is the best of the predictions that know no token


def test_baseline_of_a_model_of_the_strongest_atoms_is_their_mean_code(coded: Path, tmp_path: Path) -> None:
    mean = np.log(mean_code(CodeStore(str(coded / "train.codes")), 1))
    found = evaluate_latent_kl(saved(coded, tmp_path / "run", mean, flags=("--latent-top", 1)), coded)
    assert found.model == pytest.approx(found.unigram, rel=1e-5)


@pytest.mark.slow
def test_samples_that_do_not_fit_are_counted_and_without_any_there_is_no_result(
    coded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mean = np.log(mean_code(CodeStore(str(coded / "train.codes"))))
    all_tokens = evaluate_latent_kl(saved(coded, tmp_path / "all", mean), coded).num_tokens
    assert "longer than" not in caplog.text
    assert 0 < evaluate_latent_kl(saved(coded, tmp_path / "some", mean, 20), coded).num_tokens < all_tokens
    assert re.search(r"[1-9]\d* samples are longer than the model's positions; the other [1-9]\d* count", caplog.text)
    with pytest.raises(ValueError, match="no masked token of valid has a code"):
        evaluate_latent_kl(saved(coded, tmp_path / "none", mean, 2), coded)


def test_codes_that_the_model_does_not_predict_are_refused(coded: Path, tmp_path: Path) -> None:
    run = saved(coded, tmp_path / "run", np.zeros(32))
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    torch.save({**state, "task_state": {"codes_over": "a" * 64}}, run / "checkpoint_last.pt")
    said = f"the codes in {coded} are over another dictionary (SHA-256 {'0' * 12}) than those that {run} predicts (aaaa"
    with pytest.raises(ValueError, match=re.escape(said)):
        evaluate_latent_kl(run, coded)
    torch.save({**state, "task_state": {"codes_over": "0" * 64}}, run / "checkpoint_last.pt")
    assert evaluate_latent_kl(run, coded).num_tokens > 300
    other = shutil.copytree(coded, tmp_path / "other")
    meta = other / "train.codes" / "meta.json"
    meta.write_text(meta.read_text(encoding="utf-8").replace("0" * 64, "b" * 64), encoding="utf-8")
    with pytest.raises(ValueError, match=r"over another dictionary \(SHA-256 b{12}\)"):
        evaluate_latent_kl(run, other)


def test_model_without_a_latent_head_is_refused(tiny: TinyData, coded: Path) -> None:
    with pytest.raises(ValueError, match="has no latent head: it was not trained with --task masked_latent_semantic"):
        evaluate_latent_kl(tiny.model.parent, coded)
