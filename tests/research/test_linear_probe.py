"""Linear probes: the regression against a slow oracle, and means that do not depend on the batch."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from mlsm_plugin import hub
from tests.script_module import load_script
from tests.tiny_models import TinyData

load_script("research/compare_objectives.py")
from comparison.linear_probe import logistic_regression, probe_accuracy, sentence_means  # noqa: E402


def rows_and_labels(seed: int, number: int, dim: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose labels a noisy linear classifier gives."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((number, dim))
    labels = (rows @ rng.standard_normal((dim, classes)) + 0.5 * rng.standard_normal((number, classes))).argmax(axis=1)
    return torch.from_numpy(rows), torch.from_numpy(labels)


def test_regression_finds_the_minimum() -> None:
    rows, labels = rows_and_labels(1, 80, 4, 3)
    padded = np.concatenate([rows.numpy(), np.ones((80, 1))], axis=1)

    def objective(flat: np.ndarray) -> float:
        weights = flat.reshape(5, 3)
        logits = padded @ weights
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(80), labels.numpy()] - np.log(np.exp(logits).sum(axis=1))
        return float(-chosen.mean() + 1e-2 * (weights**2).sum())

    oracle = minimize(objective, np.zeros(15), tol=1e-10)
    found = logistic_regression(rows, labels, 3, 1e-2)
    assert objective(found.numpy().ravel()) == pytest.approx(oracle.fun, abs=1e-6)
    np.testing.assert_allclose(found.numpy(), oracle.x.reshape(5, 3), atol=1e-3)


def test_what_is_linear_is_found_and_what_is_random_is_not() -> None:
    rows, labels = rows_and_labels(2, 600, 6, 2)
    shifted = 1e3 * rows + 1e5  # columns of any scale
    assert probe_accuracy(shifted[:400], labels[:400], shifted[400:], labels[400:]) > 0.85
    noise = torch.from_numpy(np.random.default_rng(3).integers(0, 2, 600))
    assert probe_accuracy(rows[:400], noise[:400], rows[400:], noise[400:]) < 0.65
    with pytest.raises(ValueError, match="needs at least 2 training rows, got 1"):
        probe_accuracy(rows[:1], labels[:1], rows, labels)


def test_means_do_not_depend_on_the_batch(tiny: TinyData, caplog: pytest.LogCaptureFixture) -> None:
    model = hub.from_pretrained(tiny.model.parent)
    texts = [line for line in tiny.text.read_text(encoding="utf-8").splitlines() if line.strip()][:9]
    texts.insert(0, texts[0][:15])  # the others are longer than the positions, and are cut
    together = sentence_means(model, texts, batch_size=4)
    assert together.shape == (10, 32)
    torch.testing.assert_close(together, sentence_means(model, texts, batch_size=1), atol=1e-5, rtol=1e-5)
    alone = model.extract_features(model.encode(texts[0]))[0].mean(dim=0).double()
    torch.testing.assert_close(together[0], alone, atol=1e-5, rtol=1e-5)
    assert re.search(r"[1-9] of 10 texts are longer than the model's positions and are cut", caplog.text)
    with pytest.raises(ValueError, match=r"the text '\\u200b' has no tokens after normalization"):
        sentence_means(model, [texts[0], "\u200b"])
