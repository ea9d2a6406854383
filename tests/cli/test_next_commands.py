"""The commands to paste are understood by the parsers that will read them."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fairseq import options
from transformers import AutoModelForMaskedLM

import mlsm_plugin  # noqa: F401  (registers)
from mlsm_plugin.cli.main import build_parser
from mlsm_plugin.cli.next_commands import (
    EXAMPLES,
    encode_command,
    example_sentences,
    filling_command,
    similarity_command,
    training_command,
)
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from tests.conftest import PLUGIN
from tests.tiny_hf_models import make_model

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


def test_sentences_are_those_of_the_text_or_general_ones(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short\n\nfive words are long enough\nthese are five words, too\nand the others are left\n")
    assert list(example_sentences(text)) == ["five words are long enough", "these are five words, too"]
    text.write_text("five words are long enough\n")
    assert example_sentences(text) == example_sentences(tmp_path / "none") == EXAMPLES


@pytest.mark.parametrize("is_sentence_transformer", [False, True])
def test_odd_names_are_quoted(tmp_path: Path, is_sentence_transformer: bool) -> None:
    command = similarity_command(f'{ODD}/"é"', tmp_path / "none", is_sentence_transformer=is_sentence_transformer)
    _, _, code = words_of(command)
    strings = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert {f'{ODD}/"é"', *EXAMPLES} <= set(strings)


@pytest.mark.slow
def test_the_commands_print_something_in_a_shell(tmp_path: Path, english_text: tuple[Path, Path]) -> None:
    model = make_model("bert", english_text[1], tmp_path / ODD, kind=AutoModelForMaskedLM)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in (
        filling_command(model, english_text[1]),
        similarity_command(model, english_text[1], is_sentence_transformer=False),
    ):
        done = subprocess.run(
            ["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip()
