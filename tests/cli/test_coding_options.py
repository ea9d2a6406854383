"""Options that several coding commands share: blocks, shares of the work, numbers that are positive."""

from __future__ import annotations

import argparse

import pytest

from mlsm_plugin.cli.coding_options import add_block_options, add_share_options, block_settings, check_positive
from mlsm_plugin.cli.settings_flags import add_settings
from mlsm_plugin.core.hidden_states.settings import BlockSettings, ModelRun
from tests.tiny_models import TRAINED_TOKENS, TinyData


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for add in (add_block_options, add_share_options):
        add(parser)
    add_settings(parser, ModelRun)
    return parser.parse_args(words)


LEARNED = {"tokens_per_sample": 20, "sample_break_mode": "complete_doc"}


def test_option_comes_before_the_dictionary_and_that_before_the_model(tiny: TinyData) -> None:
    model = str(tiny.model)
    assert block_settings(parsed(), model) == BlockSettings(TRAINED_TOKENS, "complete")
    assert block_settings(parsed(), "no such model", LEARNED) == BlockSettings(20, "complete_doc")
    given = parsed("--tokens-per-sample", "30")
    assert block_settings(given, "no such model", LEARNED) == BlockSettings(30, "complete_doc")
    assert block_settings(given, "no such model") == BlockSettings(30, "complete")
    given = parsed("--sample-break-mode", "eos")
    assert block_settings(given, model, {}) == BlockSettings(TRAINED_TOKENS, "eos")
    assert block_settings(given, "no such model", LEARNED) == BlockSettings(20, "eos")
    with pytest.raises(FileNotFoundError, match="no such model does not exist"):
        block_settings(given, "no such model")
    with pytest.raises(ValueError, match="--tokens-per-sample must be at least 2"):
        block_settings(parsed("--tokens-per-sample", "1"), model)


def test_share_and_model_have_no_default_of_their_own() -> None:
    args = parsed()
    assert (args.process_index, args.num_processes, args.device, args.threads) == (None, None, None, None)
    assert (args.fp16, args.batch_tokens) == (False, 8192)


def test_numbers_have_to_be_positive() -> None:
    args = argparse.Namespace(threads=None, batch_tokens=1, lambda_=float("nan"), max_tokens=0, lr=-0.5, k=float("inf"))
    check_positive(args, "threads", "batch_tokens")
    for name, message in (
        ("lambda_", "--lambda must be positive, got nan"),
        ("max_tokens", "--max-tokens must be positive, got 0"),
        ("lr", "--lr must be positive, got -0.5"),
        ("k", "--k must be finite, got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            check_positive(args, "threads", name)
