"""The recipe of printed commands: complete, that of ``mlsm auxiliary``, and as long as the text needs."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from fairseq import options

import mlsm_plugin  # noqa: F401  (registers)
from mlsm_plugin.core.hidden_states.settings import BlockSettings
from mlsm_plugin.fairseq_plugin.pipelines.pretraining import default_flags
from mlsm_plugin.fairseq_plugin.pipelines.training_recipe import (
    COLUMNS,
    PLAIN,
    TrainingPlan,
    continued,
    shell_command,
    tokens_in,
    training_words,
)
from tests.conftest import Pipeline
from tests.tiny_models import TinyData

BLOCKS = BlockSettings(128, "none")


def parsed(words: list[str]) -> dict[str, Any]:
    """What ``fairseq-train`` makes of its words, without the plugin, which is imported already."""
    where = words.index("--user-dir")
    return vars(options.parse_args_and_arch(options.get_training_parser(), words[1:where] + words[where + 2 :]))


def test_it_is_the_recipe_of_the_auxiliary_model() -> None:
    plan = TrainingPlan(50_000_000, BLOCKS, PLAIN)
    printed = parsed(training_words("data", "model", plan))
    updates = printed["max_update"]
    flags = default_flags(updates, "mlsm_modern_small", [])
    usual = parsed(["fairseq-train", "data", "--user-dir", "here", *flags, "--max-update", str(updates)])
    differing = {name for name in printed if printed[name] != usual[name]}
    assert differing == {"save_dir", "sample_break_mode", "tokens_per_sample", "mask_updates"}


@pytest.mark.parametrize(
    ("tokens", "start", "updates", "batch", "width"),
    [
        (20_000, None, 300, 8, 256),
        (455_697, None, 800, 8, 256),
        (455_697, "aux.pt", 400, 8, 256),
        (9_999_999, None, 19_500, 8, 256),
        (10_000_000, None, 4_800, 32, 512),
        (10_000_000_000, None, 100_000, 32, 512),
    ],
)
def test_its_length_follows_from_the_text(tokens: int, start: str | None, updates: int, batch: int, width: int) -> None:
    args = parsed(training_words("data", "model", TrainingPlan(tokens, BLOCKS, PLAIN, start=start)))
    assert (args["max_update"], int(args["total_num_update"])) == (updates, updates)
    assert (args["batch_size"], args["encoder_embed_dim"], args["finetune_from_model"]) == (batch, width, start)
    assert args["no_epoch_checkpoints"]
    assert args["warmup_updates"] == updates * 6 // 100
    assert args["muon_block_rows"] == (64 if updates <= 1_200 else None)
    assert (args["mask_prob"], args["mask_prob_end"]) == (0.3, 0.15)


@pytest.mark.parametrize(("coverage", "share"), [(0.2, 0.15), (0.15, 0.15), (0.1, 0.1), (0.025, 0.025)])
def test_no_more_is_masked_than_has_codes(coverage: float, share: float) -> None:
    args = parsed(training_words("data", "model", TrainingPlan(1000, BLOCKS, coverage=coverage)))
    assert (args["mask_prob"], args["mask_prob_end"]) == (share, None)
    assert (args["task"], args["criterion"], args["mlm_weight"]) == ("masked_latent_semantic", "latent_semantic_kl", 1)


@pytest.mark.slow
def test_a_training_continues_an_encoder_of_this_package_with_its_sizes(pipeline: Pipeline, tiny: TinyData) -> None:
    blocks = BlockSettings(64)
    flags, start = continued(str(pipeline.auxiliary), blocks)
    assert start == str(pipeline.auxiliary)
    args = parsed(training_words("data", "model", TrainingPlan(1000, blocks, model=flags, start=start)))
    assert (args["encoder_layers"], args["encoder_embed_dim"], args["encoder_ffn_embed_dim"]) == (2, 32, 64)
    assert (args["arch"], args["encoder_attention_heads"]) == ("mlsm_roberta_tiny", 2)
    assert args["finetune_from_model"] == start
    assert continued(str(tiny.model), blocks) == ((), None)  # its task is one of fairseq
    assert continued("hf:encoder", blocks) == ((), None)


def test_the_length_of_a_text(tiny: TinyData) -> None:
    sentences = tiny.text.read_text(encoding="utf-8").splitlines()
    assert sum(map(len, sentences)) / 8 < tokens_in(tiny.data_bin) < sum(map(len, sentences))


def test_a_command_is_cut_between_its_options() -> None:
    odd = "it's a $folder; with 'quotes'"
    words = training_words(f"{odd}/data", odd, TrainingPlan(1000, BLOCKS, codes=f"{odd}/codes"), user_dir=odd)
    command = shell_command(words)
    assert shlex.split(command.replace("\\\n", " ")) == words
    first, *lines = command.split(" \\\n")
    assert first.startswith("fairseq-train ")
    assert all(line.startswith("    --") and len(line) <= COLUMNS for line in lines)
