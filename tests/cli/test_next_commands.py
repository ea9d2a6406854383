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
    masked_lm_command,
    similarity_command,
    training_command,
)
from mlsm_plugin.core.coding.split_coder import CodingSettings
from mlsm_plugin.core.files.sentence_modules import write_modules
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.fairseq_plugin.compat.checkpoint_states import updates_of
from tests.conftest import PLUGIN, Pipeline
from tests.documented import run_in
from tests.tiny_hf_models import make_model
from tests.tiny_models import TinyData

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


def parsed(tiny: TinyData, *arguments: Any, **further: Any) -> Any:
    words = words_of(training_command(tiny.data_bin, *arguments, **further))
    assert words[0] == "fairseq-train"
    return options.parse_args_and_arch(options.get_training_parser(), words[1:])


def test_training_command_is_one_of_mlsm_on_the_blocks_of_the_codes(tiny: TinyData) -> None:
    args = parsed(tiny, ODD, CodingSettings(2, BlockSettings(48, "eos")), "hf:encoder", codes=ODD)
    assert (args.data, args.save_dir, args.latent_codes) == (str(tiny.data_bin), ODD, ODD)
    assert (args.task, args.criterion, args.arch) == (
        "masked_latent_semantic",
        "latent_semantic_kl",
        "mlsm_modern_small",
    )
    assert (args.sample_break_mode, args.tokens_per_sample, args.mlm_weight) == ("eos", 48, 1)
    assert (args.user_dir, args.optimizer, args.finetune_from_model) == (str(PLUGIN), "muon", None)


def test_masked_lm_command_is_one_of_plain_masked_lm(tiny: TinyData) -> None:
    words = words_of(masked_lm_command(tiny.data_bin, ODD, 10_000))
    args = options.parse_args_and_arch(options.get_training_parser(), words[1:])
    assert (args.data, args.save_dir, args.task) == (str(tiny.data_bin), ODD, "plain_masked_lm")
    assert (args.sample_break_mode, args.tokens_per_sample) == ("none", 128)


def test_plugin_of_the_user_takes_the_place_of_this_one(tiny: TinyData) -> None:
    coding = CodingSettings(2, BlockSettings(48))
    words = words_of(training_command(tiny.data_bin, "model", coding, "hf:encoder", ODD))
    assert words[words.index("--user-dir") + 1] == ODD
    assert words.count("--user-dir") == 1


def test_sentences_are_those_of_the_text_or_general_ones(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short\n\nfive words are long enough\nthese are five words, too\nand the others are left\n")
    assert list(example_sentences(text)) == ["five words are long enough", "these are five words, too"]
    text.write_text("five words are long enough\n")
    assert example_sentences(text) == example_sentences(tmp_path / "none") == EXAMPLES
    text.write_text("\n\n", encoding="utf-8")
    assert example_sentences(text) == EXAMPLES


@pytest.mark.parametrize("is_sentence_transformer", [False, True])
def test_odd_names_are_quoted(tmp_path: Path, is_sentence_transformer: bool) -> None:
    command = similarity_command(f'{ODD}/"é"', tmp_path / "none", is_sentence_transformer=is_sentence_transformer)
    _, _, code = words_of(command)
    strings = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert {f'{ODD}/"é"', *EXAMPLES} <= set(strings)


def test_vectors_are_pooled_as_the_folder_says(tmp_path: Path) -> None:
    command = similarity_command(tmp_path, tmp_path / "none", is_sentence_transformer=False)
    assert command.count("[0].mean(0)") == 2
    write_modules(tmp_path, width=32, max_length=20)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}', encoding="utf-8")
    command = similarity_command(tmp_path, tmp_path / "none", is_sentence_transformer=False)
    assert command.count("[0, 0]") == 2
    assert "mean" not in command


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_commands_print_something_in_a_shell(tmp_path: Path, english_text: tuple[Path, Path]) -> None:
    model = make_model("bert", english_text[1], tmp_path / ODD, kind=AutoModelForMaskedLM)
    of_first_token = make_model("bert", english_text[1], tmp_path / "of-first-token")
    write_modules(of_first_token, width=32, max_length=20)
    (of_first_token / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}', encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in (
        filling_command(model, english_text[1]),
        similarity_command(model, english_text[1], is_sentence_transformer=False),
        similarity_command(of_first_token, english_text[1], is_sentence_transformer=False),
    ):
        done = subprocess.run(
            ["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_printed_commands_run_as_they_are(pipeline: Pipeline, tmp_path: Path) -> None:
    """From text to a trained model; each command but the first of a kind is the one that the command before printed.

    Of the first training, of a larger model, the beginning: the second is run to its end.
    """
    text = f"--train {pipeline.train_text} --valid {pipeline.valid_text}"
    printed = run_in(tmp_path, f"mlsm binarize --tokenizer {pipeline.tokenizer} {text} --output data-bin")
    run_in(tmp_path, f"{after(printed, 'Train masked LM with').rstrip()} --max-update 5")
    assert updates_of(tmp_path / "masked-lm" / "checkpoint_last.pt") == 5
    learned = f"--auxiliary {pipeline.auxiliary} --layer 2 --atoms 16 --tokens 500 --iterations 3"
    printed = run_in(tmp_path, f"mlsm dictionary data-bin {learned} --output dict")
    printed = run_in(tmp_path, after(printed, "Code the dataset with"))
    training = after(printed, "Train with")
    run_in(tmp_path, training)
    assert f"--finetune-from-model {pipeline.auxiliary}" in training
    assert updates_of(tmp_path / "model" / "checkpoint_last.pt") == 300
    assert len(list((tmp_path / "model").glob("*.pt"))) == 2  # the last and the best


def after(printed: str, purpose: str) -> str:
    """The command that was printed for a purpose."""
    return printed.split(f"\n{purpose}:\n\n")[1]
