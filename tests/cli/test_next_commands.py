"""The commands to paste are understood by the parsers that will read them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from fairseq import options

import mlsm_plugin  # noqa: F401  (registers)
from mlsm_plugin.cli.main import build_parser
from mlsm_plugin.cli.next_commands import encode_command, training_command
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from tests.conftest import PLUGIN

ODD = "it's a $folder; with 'quotes'"


def words_of(command: str) -> list[str]:
    """As a shell reads it."""
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("user_dir", [None, ODD])
def test_encode_command_has_what_the_dictionary_was_given(user_dir: str | None) -> None:
    words = words_of(encode_command(f"{ODD}/data", "hf:a/b c", ODD, user_dir))
    assert words[:2] == ["mlsm", "encode"]
    args = build_parser("encode").parse_args(words[1:])
    assert (args.data, args.auxiliary, args.dictionary, args.user_dir) == (f"{ODD}/data", "hf:a/b c", ODD, user_dir)


def parsed(*arguments: Any) -> Any:
    words = words_of(training_command(*arguments))
    assert words[0] == "fairseq-train"
    return options.parse_args_and_arch(options.get_training_parser(), words[1:])


def test_training_command_is_one_of_mlsm_on_the_blocks_of_the_codes() -> None:
    args = parsed(f"{ODD}/data", ODD, CodingSettings(2, BlockSettings(48, "eos")), None)
    assert (args.data, args.save_dir, args.tokens_per_sample) == (f"{ODD}/data", ODD, 48)
    assert (args.task, args.criterion, args.arch) == (
        "masked_latent_semantic",
        "latent_semantic_kl",
        "mlsm_modern_small",
    )
    assert (args.sample_break_mode, args.mlm_weight, args.user_dir) == ("eos", 1, str(PLUGIN))
    assert args.max_update == int(args.total_num_update) == 100_000
    assert (args.optimizer, args.mask_prob, args.mask_prob_end) == ("muon", 0.3, 0.15)


def test_no_more_is_masked_than_has_codes() -> None:
    args = parsed("data", "model", CodingSettings(2, BlockSettings(48), coverage=0.2), None)
    assert (args.mask_prob, args.mask_prob_end) == (0.15, None)


def test_plugin_of_the_user_takes_the_place_of_this_one() -> None:
    words = words_of(training_command("data", "model", CodingSettings(2, BlockSettings(48)), ODD))
    assert words[words.index("--user-dir") + 1] == ODD
    assert words.count("--user-dir") == 1
