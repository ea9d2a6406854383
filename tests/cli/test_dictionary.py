"""``mlsm dictionary``: learned again to the same bytes, imported, replaced, refused; and the command that follows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from fairseq import options

from tests.cli.coding_runs import BLOCKS, contents, meta_of, start_mlsm
from tests.conftest import PLUGIN, Pipeline, failing_mlsm, mlsm
from tests.fairseq_process import LARGEST_FILE
from tests.tiny_models import TRAINED_TOKENS, TinyData

FEW = ("--atoms", 16, "--tokens", 600, "--iterations", 5, "--batch-size", 50)
FEW_OF_TINY = ("--atoms", 40, "--tokens", 400, "--iterations", 5, "--batch-size", 50)


def learn(pipeline: Pipeline, output: Path, *options: object) -> Path:
    mlsm(
        *("dictionary", pipeline.data_bin, "--auxiliary", pipeline.auxiliary, "--layer", 2, "--output", output),
        *(*FEW, *BLOCKS, *options),
    )
    return output


def test_same_seed_gives_the_same_dictionary_bytes_and_another_seed_does_not(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    first, again = learn(pipeline, tmp_path / "first"), learn(pipeline, tmp_path / "again")
    other = learn(pipeline, tmp_path / "other", "--seed", 2)
    assert sorted(contents(first)) == ["dictionary.npy", "meta.json"]
    assert contents(first) == contents(again)
    assert contents(first)["dictionary.npy"] != contents(other)["dictionary.npy"]


def test_dictionary_says_how_to_make_it_again(pipeline: Pipeline, tmp_path: Path) -> None:
    meta = meta_of(learn(pipeline, tmp_path / "made", "--lambda", 0.1, "--seed", 5))
    chosen = {
        **{"layer": 2, "lambda": 0.1, "n_atoms": 16, "dim": 32, "tokens": 600, "iterations": 5, "batch_size": 50},
        **{"seed": 5, "fp16": False, "batch_tokens": 8192},
        "blocks": {"tokens_per_sample": 64, "sample_break_mode": "complete"},
    }
    assert {name: meta[name] for name in chosen} == chosen
    codes_meta = meta_of(pipeline.data_bin / "train.codes")
    assert meta["auxiliary_fingerprint"] == codes_meta["fingerprints"]["auxiliary"]
    assert meta["split_fingerprint"] == codes_meta["fingerprints"]["split"]
    assert meta["auxiliary"] == codes_meta["auxiliary"]
    assert meta["text"] == f"{pipeline.data_bin.name}/train"
    assert meta["threads"] >= 1
    assert 0 < meta["health"]["reconstruction_error"] < 1
    assert meta["mlsm_plugin"]


def test_dictionary_is_replaced_only_when_told_so(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = learn(pipeline, tmp_path / "made")
    before = contents(made)
    words = ("dictionary", pipeline.data_bin, "--auxiliary", pipeline.auxiliary, "--layer", 2, "--output", made)
    assert "--overwrite" in failing_mlsm(capsys, *words, *FEW, *BLOCKS, "--seed", 2)
    assert contents(made) == before
    learn(pipeline, made, "--seed", 2, "--overwrite")
    assert contents(made)["dictionary.npy"] != before["dictionary.npy"]


def test_another_number_of_tokens_is_another_dictionary(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    learn_tiny(tiny, tiny.data_bin, made, "--tokens", 10**6)
    meta = meta_of(made)
    assert meta["requested_tokens"] == 10**6
    assert 100 < meta["tokens"] < 10**5  # the whole text
    words = ("dictionary", tiny.data_bin, "--auxiliary", tiny.model, "--layer", 1, "--output", made, *FEW_OF_TINY)
    line = failing_mlsm(capsys, *words, "--tokens", 300)
    assert "requested_tokens is 1000000 there and 300 now. Pass --overwrite" in line


def test_a_dictionary_is_complete_whatever_threads_and_batches_say(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `mlsm pretrain` asks for it again when it resumes with other ones."""
    learn_tiny(tiny, tiny.data_bin, tmp_path / "made", "--threads", 1)
    before = contents(tmp_path / "made")
    learn_tiny(tiny, tiny.data_bin, tmp_path / "made", "--threads", 2, "--batch-tokens", 100)
    assert "nothing to do" in capsys.readouterr().out
    assert contents(tmp_path / "made") == before


def test_a_damaged_meta_file_is_replaced_when_told_so(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    learn_tiny(tiny, tiny.data_bin, made)
    before = contents(made)
    (made / "meta.json").write_bytes(b"{")
    words = ("dictionary", tiny.data_bin, "--auxiliary", tiny.model, "--layer", 1, "--output", made, *FEW_OF_TINY)
    assert "meta.json is not valid JSON" in failing_mlsm(capsys, *words)
    mlsm(*words, "--overwrite")
    assert contents(made) == before


def test_dictionary_that_nothing_uses_is_not_written(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--auxiliary", pipeline.auxiliary, "--layer", 2, "--output", tmp_path / "made", *FEW, *BLOCKS)
    line = failing_mlsm(capsys, "dictionary", pipeline.data_bin, *words, "--backend", "torch", "--lambda", 1.5)
    assert "lambda 1.5 is too large" in line
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_disk_that_fills_up_leaves_no_dictionary(pipeline: Pipeline, tmp_path: Path) -> None:
    words = ("--auxiliary", pipeline.auxiliary, "--layer", 2, "--output", tmp_path / "made", *FEW, *BLOCKS)
    run = start_mlsm("dictionary", pipeline.data_bin, *words, variables={LARGEST_FILE: "1000"})
    errors = run.communicate()[1]
    assert run.returncode == 1
    assert re.search(r"^mlsm: error: .*/made/dictionary.npy: File too large$", errors, flags=re.MULTILINE)
    assert not (tmp_path / "made").exists()


def test_more_atoms_than_hidden_states_is_one_line(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failing_mlsm(
        *(capsys, "dictionary", pipeline.data_bin, "--auxiliary", pipeline.auxiliary, "--layer", 2),
        *("--output", tmp_path / "made", "--atoms", 500, "--tokens", 100, *BLOCKS),
    )
    assert "tokens is 100, fewer than the 500 atoms that are learned from them" in line
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, 0) for option in ("--atoms", "--tokens", "--iterations", "--batch-size")),
        *((option, -1) for option in ("--lambda", "--threads", "--seed")),
        *(("--lambda", "nan"), ("--tokens-per-sample", 1), ("--layer", 3), ("--tokens-per-sample", 65)),
    ],
)
def test_number_that_makes_no_sense_is_refused_by_name(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: object
) -> None:
    words = ("dictionary", pipeline.data_bin, "--auxiliary", pipeline.auxiliary, "--layer", 2)
    line = failing_mlsm(capsys, *words, "--output", tmp_path / "made", *FEW, *BLOCKS, option, value)
    assert option in line
    assert str(value) in line
    assert not (tmp_path / "made").exists()


def test_file_that_is_no_checkpoint_is_one_line(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("dictionary", pipeline.data_bin, "--layer", 2, "--output", tmp_path / "made", *FEW, "--auxiliary")
    (tmp_path / "text.pt").write_text("this is not a checkpoint\n" * 10)
    for name, message in (("absent.pt", "does not exist"), ("text.pt", "checkpoint")):
        line = failing_mlsm(capsys, *words, tmp_path / name)
        assert str(tmp_path / name) in line
        assert message in line
    assert not (tmp_path / "made").exists()


# ---- blocks, and the command that follows ------------------------------------------------------------------


def after(output: str, title: str) -> list[str]:
    """The words of the command that stands after a title."""
    return shlex.split(output.split(f"{title}:\n\n")[1].replace("\\\n", " "))


def learn_tiny(tiny: TinyData, data: Path, output: Path, *options: object) -> None:
    words = ("dictionary", data, "--auxiliary", tiny.model, "--layer", 1, "--output", output)
    mlsm(*words, *FEW_OF_TINY, *options)


def test_each_command_ends_with_the_next_one_and_all_see_the_same_blocks(
    tiny: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody says how long a block is: the auxiliary model was trained on 24 tokens and has 32 positions."""
    data = tiny.copy(tmp_path / "data bin")
    learn_tiny(tiny, data, tmp_path / "made")
    blocks = {"tokens_per_sample": TRAINED_TOKENS, "sample_break_mode": "complete"}
    assert meta_of(tmp_path / "made")["blocks"] == blocks
    command = after(capsys.readouterr().out, "Code the dataset with")
    assert command[:2] == ["mlsm", "encode"]
    mlsm(*command[1:])
    assert {split: meta_of(data / f"{split}.codes")["blocks"] for split in ("train", "valid")} == {
        "train": blocks,
        "valid": blocks,
    }
    command = after(capsys.readouterr().out, "Train with")
    assert command[0] == "fairseq-train"
    args = options.parse_args_and_arch(options.get_training_parser(), command[1:])
    assert (args.data, args.task, args.user_dir) == (str(data), "masked_latent_semantic", str(PLUGIN))
    assert (args.tokens_per_sample, args.sample_break_mode) == (TRAINED_TOKENS, "complete")


def test_coding_takes_the_blocks_of_the_dictionary_unless_told_otherwise(tiny: TinyData, tmp_path: Path) -> None:
    data = tiny.copy(tmp_path / "data-bin")
    learn_tiny(tiny, data, tmp_path / "made", "--tokens-per-sample", 12, "--sample-break-mode", "eos")
    words = ("encode", data, "--auxiliary", tiny.model, "--dictionary", tmp_path / "made", "--coverage", 0.05)
    mlsm(*words, "--splits", "train")
    assert meta_of(data / "train.codes")["blocks"] == {"tokens_per_sample": 12, "sample_break_mode": "eos"}
    mlsm(*words, "--splits", "valid", "--tokens-per-sample", 20)
    assert meta_of(data / "valid.codes")["blocks"] == {"tokens_per_sample": 20, "sample_break_mode": "eos"}
