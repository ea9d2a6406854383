"""Settings of learning: defaults of each kind, and what does not go together.

``tests/cli/test_dictionary.py`` and ``tests/huggingface/test_dictionaries.py`` learn with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from mlsm_plugin.core.coding.coder_learning import CHECKPOINT_FILE, LearningSettings, learn_into, learning_plan
from mlsm_plugin.core.hidden_states.blocks import TokenBlocks
from mlsm_plugin.core.hidden_states.settings import BlockSettings


def test_each_kind_has_its_defaults() -> None:
    lasso, sae = LearningSettings(layer=1), LearningSettings(layer=1, coder="topk")
    assert (lasso.lambda_, lasso.iterations, lasso.backend, lasso.batch_size, lasso.k) == (
        0.05,
        1000,
        "torch",
        400,
        None,
    )
    assert (sae.k, sae.matryoshka, sae.learning_rate, sae.batch_size, sae.lambda_) == (32, [], 3e-3, 256, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coder": "pca"}, "coder must be one of lasso, topk, batchtopk, got 'pca'"),
        ({"atoms": 0}, "atoms must be positive, got 0"),
        ({"lambda_": -1.0}, "lambda_ must be positive, got -1"),
        ({"batch_tokens": 0}, "batch_tokens must be positive"),
        ({"seed": -1}, "seed must be at least 0 and below"),
        ({"k": 3}, "k cannot be used with coder lasso; leave it out, or choose topk or batchtopk"),
        ({"coder": "topk", "lambda_": 0.1}, "lambda_ cannot be used with coder topk; leave it out, or choose lasso"),
        ({"coder": "topk", "k": 5, "atoms": 4}, "k"),
        ({"coder": "topk", "atoms": 64, "tokens": 20}, "tokens is 20, fewer than the 64 atoms that are learned from"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearningSettings(layer=1, **options)


def test_plan_holds_what_decides_the_coder() -> None:
    common = {"auxiliary": "a", "split": "b"}
    blocks = BlockSettings(9, "eos")
    plan = learning_plan(LearningSettings(layer=1, threads=2), blocks=blocks, **common)  # type: ignore[arg-type]
    assert list(plan) == [
        *("layer", "lambda", "auxiliary_fingerprint", "blocks", "fp16", "requested_tokens", "n_atoms", "method"),
        *("iterations", "batch_size", "seed", "batch_tokens", "threads"),
        "split_fingerprint",
    ]
    sae = learning_plan(LearningSettings(layer=1, coder="batchtopk"), blocks=None, **common)  # type: ignore[arg-type]
    assert list(sae) == [
        *("layer", "auxiliary_fingerprint", "fp16", "n_atoms", "method", "k", "matryoshka", "learning_rate", "tokens"),
        *("batch_size", "seed", "batch_tokens", "split_fingerprint"),
    ]
    assert (plan["method"], sae["method"], plan["blocks"]) == ("online", "batchtopk", {
        "tokens_per_sample": 9, "sample_break_mode": "eos",
    })  # fmt: skip


def test_a_stopped_training_of_an_autoencoder_is_not_lost_to_a_dictionary(tmp_path: Path) -> None:
    class OpenedError(Exception):
        """Instead of learning."""

    def opened() -> Any:
        raise OpenedError

    (tmp_path / CHECKPOINT_FILE).touch()
    settings, reader = LearningSettings(layer=1), cast(TokenBlocks, None)
    origin = {"auxiliary": "a", "split": "b", "blocks": None}
    with pytest.raises(ValueError, match=r"training\.pt belongs to a stopped training of a sparse autoenc"):
        learn_into(tmp_path, settings, reader, opened, **origin)  # type: ignore[arg-type]
    with pytest.raises(OpenedError):
        learn_into(tmp_path, settings, reader, opened, **origin, overwrite=True)  # type: ignore[arg-type]
