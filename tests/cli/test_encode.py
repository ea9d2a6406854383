"""``mlsm encode`` on a real dataset and model: exact, resumed, and refused where files do not belong together."""

from __future__ import annotations

import logging
import re
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, TokenBlockDataset, data_utils

from mlsm_plugin.core.sparse_coding.code_store import CodeStore
from mlsm_plugin.core.sparse_coding.dictionary import AtomDictionary
from tests.cli.coding_runs import (
    BLOCKS,
    SHARDS,
    contents,
    encode_words,
    kill_once_there,
    meta_of,
    split_tokens,
    start_mlsm,
)
from tests.conftest import Pipeline, failing_mlsm, fairseq_train, mlsm
from tests.fairseq_process import LARGEST_FILE

# ---- dictionary ------------------------------------------------------------------------------------------


# ---- encode ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_killed_coding_goes_on_to_the_same_bytes(
    pipeline: Pipeline, data_bin: Path, uninterrupted: dict[str, bytes]
) -> None:
    codes = data_bin / "valid.codes"
    run = start_mlsm(*encode_words(pipeline, data_bin, *SHARDS), start_new_session=True)
    kill_once_there(run, codes / "shard-00001.indptr.npy")
    assert not (codes / "meta.json").exists()
    kept = (codes / "shard-00000.weights.npy").stat().st_mtime_ns

    again = start_mlsm(*encode_words(pipeline, data_bin, *SHARDS))
    assert again.wait() == 0, again.communicate()[1]
    again.communicate()
    assert contents(codes) == uninterrupted
    assert (codes / "shard-00000.weights.npy").stat().st_mtime_ns == kept


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_disk_that_fills_up_is_one_line_and_the_same_command_goes_on(
    pipeline: Pipeline, data_bin: Path, uninterrupted: dict[str, bytes]
) -> None:
    largest = max(len(content) for content in uninterrupted.values())
    run = start_mlsm(*encode_words(pipeline, data_bin, *SHARDS), variables={LARGEST_FILE: str(largest - 1000)})
    output, errors = run.communicate()
    assert run.returncode == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("mlsm: error: ")]
    assert re.fullmatch(r"mlsm: error: .*/valid\.codes/shard-\d+\.\w+\.npy: File too large", line)
    assert "Traceback" not in output + errors
    assert not (data_bin / "valid.codes" / "meta.json").exists()

    again = start_mlsm(*encode_words(pipeline, data_bin, *SHARDS))
    again.communicate()
    assert again.returncode == 0
    assert contents(data_bin / "valid.codes") == uninterrupted


@pytest.mark.slow
def test_coding_again_says_so_and_touches_nothing(
    pipeline: Pipeline, data_bin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlsm(*encode_words(pipeline, data_bin))
    before = {path: path.stat().st_mtime_ns for path in (data_bin / "valid.codes").iterdir()}
    capsys.readouterr()
    mlsm(*encode_words(pipeline, data_bin))
    assert "valid: nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (data_bin / "valid.codes").iterdir()} == before


@pytest.mark.slow
def test_codes_go_to_a_folder_of_their_own(
    pipeline: Pipeline, data_bin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = tmp_path / "new" / "codes"
    mlsm(*encode_words(pipeline, data_bin, "--output", codes))
    assert f"--latent-codes {codes}" in capsys.readouterr().out
    assert contents(codes / "valid.codes") == contents(pipeline.data_bin / "valid.codes")
    assert not (data_bin / "valid.codes").exists()


def test_layer_and_penalty_come_from_the_dictionary(pipeline: Pipeline) -> None:
    meta, dictionary = meta_of(pipeline.data_bin / "valid.codes"), meta_of(pipeline.dictionary)
    assert (meta["layer"], meta["lambda"]) == (dictionary["layer"], dictionary["lambda"]) == (2, 0.05)


def inner_states(checkpoint: Path, data: Path, block: np.ndarray) -> list[np.ndarray]:
    """All hidden states ``(T, dim)`` of one block, by fairseq's own means."""
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    with torch.no_grad():
        _, extra = models[0].eval().extract_features(torch.from_numpy(block)[None], return_all_hiddens=True)
    return [state[:, 0].numpy() for state in extra["inner_states"]]


def lasso(hidden: np.ndarray, atoms: np.ndarray, penalty: float) -> np.ndarray:
    """The non-negative sparse codes, by many plain proximal gradient steps in float64."""
    x, d = hidden.astype(np.float64), atoms.astype(np.float64)
    step = 1 / np.linalg.norm(d @ d.T, 2)
    codes = momentum = np.zeros((len(x), len(d)))
    weight = 1.0
    for _ in range(3000):
        previous, before = codes, weight
        codes = np.maximum(momentum - step * ((momentum @ d - x) @ d.T + penalty), 0)
        weight = (1 + np.sqrt(1 + 4 * before**2)) / 2
        momentum = codes + (before - 1) / weight * (codes - previous)
    return codes


def blocks_of(data: Path, split: str, tokens_per_sample: int) -> list[tuple[int, np.ndarray]]:
    """Flat start and tokens (without BOS) of each block; too long ones are cut."""
    symbols = Dictionary.load(str(data / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(data / split), symbols)
    limit = tokens_per_sample - 1
    blocks = TokenBlockDataset(
        dataset, dataset.sizes, limit, pad=symbols.pad(), eos=symbols.eos(), break_mode="complete"
    )
    found, start = [], 0
    for index in range(len(blocks)):
        tokens = blocks[index].numpy()
        found += [(start + first, tokens[first : first + limit]) for first in range(0, len(tokens), limit)]
        start += len(tokens)
    return found


def assert_codes_are_those_of(
    data: Path, checkpoint: Path, dictionary: AtomDictionary, *, layer: int, blocks: list[tuple[int, np.ndarray]]
) -> None:
    store = CodeStore(data / "valid.codes")
    for start, tokens in blocks:
        hidden = inner_states(checkpoint, data, np.concatenate([[0], tokens]))[layer][1:]
        hidden /= np.linalg.norm(hidden, axis=1, keepdims=True)
        expected = lasso(hidden, dictionary.atoms, dictionary.meta["lambda"])
        expected /= np.maximum(expected.sum(axis=1, keepdims=True), 1e-12)
        expected[tokens <= 2] = 0  # special symbols are never coded
        found = store.rows(start, start + len(tokens)).toarray()
        assert np.abs(found - expected).sum(axis=1).max() < 0.02


@pytest.mark.parametrize("layer", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_codes_are_the_sparse_codes_of_the_hidden_states_of_the_layer(
    pipeline: Pipeline, data_bin: Path, tmp_path: Path, layer: int
) -> None:
    np.save(tmp_path / "published.npy", np.random.default_rng(1).normal(size=(32, 40)).astype(np.float32))
    mlsm(
        *("convert", tmp_path / "published.npy", tmp_path / "made", "--transpose", "--normalize"),
        *("--auxiliary", pipeline.auxiliary, "--layer", layer, "--lambda", 0.05),
    )
    mlsm(
        *("encode", data_bin, "--auxiliary", pipeline.auxiliary, "--dictionary", tmp_path / "made"),
        *("--splits", "valid", *BLOCKS),
    )
    assert meta_of(data_bin / "valid.codes")["layer"] == layer
    blocks = blocks_of(data_bin, "valid", 64)
    assert_codes_are_those_of(
        data_bin,
        pipeline.auxiliary,
        AtomDictionary.load(tmp_path / "made"),
        layer=layer,
        blocks=blocks[:4] + blocks[-1:],
    )


def test_every_token_is_coded_except_special_ones(pipeline: Pipeline) -> None:
    for split in ("train", "valid"):
        tokens = np.concatenate(split_tokens(pipeline.data_bin, split))
        store = CodeStore(pipeline.data_bin / f"{split}.codes")
        assert len(store) == len(tokens)
        coded = np.diff(store.rows(0, len(store)).indptr) > 0
        assert not coded[tokens <= 2].any()
        assert coded[tokens > 2].mean() > 0.999  # a code is empty where no atom exceeds the penalty


@pytest.mark.slow
def test_sentence_longer_than_a_block_is_coded_in_pieces(pipeline: Pipeline, data_bin: Path) -> None:
    mlsm(*encode_words(pipeline, data_bin, "--tokens-per-sample", 16))
    lengths = [len(sentence) for sentence in split_tokens(data_bin, "valid")]
    assert max(lengths) > 32
    tokens = np.concatenate(split_tokens(data_bin, "valid"))
    store = CodeStore(data_bin / "valid.codes")
    assert (np.diff(store.rows(0, len(store)).indptr)[tokens > 2] > 0).mean() > 0.999
    blocks = blocks_of(data_bin, "valid", 16)
    start = sum(lengths[: int(np.argmax(lengths))])
    pieces = [block for block in blocks if start <= block[0] < start + max(lengths)]
    assert len(pieces) >= 3
    assert_codes_are_those_of(
        data_bin, pipeline.auxiliary, AtomDictionary.load(pipeline.dictionary), layer=2, blocks=pieces
    )


# ---- bad input -------------------------------------------------------------------------------------------


def fails_and_then_the_right_command_works(
    capsys: pytest.CaptureFixture[str], pipeline: Pipeline, data: Path, *words: object
) -> str:
    """The error line of a wrong ``mlsm encode``, which must leave nothing in the way of the right one."""
    line = failing_mlsm(capsys, *words)
    assert not (data / "valid.codes" / "meta.json").exists()
    mlsm(*encode_words(pipeline, data))
    assert contents(data / "valid.codes") == contents(pipeline.data_bin / "valid.codes")
    return line


def test_missing_dataset_is_named(pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = failing_mlsm(capsys, *encode_words(pipeline, tmp_path / "nowhere"))
    assert f"{tmp_path / 'nowhere'}" in line
    assert "mlsm binarize" in line
    line = failing_mlsm(
        *(capsys, "dictionary", tmp_path / "nowhere", "--auxiliary", pipeline.auxiliary, "--layer", 1),
        *("--output", tmp_path / "made"),
    )
    assert "mlsm binarize" in line
    assert list(tmp_path.iterdir()) == []


def test_missing_split_is_named(pipeline: Pipeline, data_bin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = failing_mlsm(capsys, *encode_words(pipeline, data_bin, "--splits", "test"))
    assert f"{data_bin / 'test'}" in line
    assert not (data_bin / "test.codes").exists()


@pytest.mark.slow
def test_dictionary_of_another_width_is_refused(
    pipeline: Pipeline, data_bin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AtomDictionary(np.eye(16, dtype=np.float32), {"layer": 2, "lambda": 0.05}).save(tmp_path / "narrow")
    line = fails_and_then_the_right_command_works(
        *(capsys, pipeline, data_bin, "encode", data_bin, "--auxiliary", pipeline.auxiliary),
        *("--dictionary", tmp_path / "narrow", "--splits", "valid", *BLOCKS),
    )
    assert "16 wide" in line
    assert "32 wide" in line


def test_missing_dictionary_is_named(
    pipeline: Pipeline, data_bin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failing_mlsm(capsys, *encode_words(pipeline, data_bin, "--dictionary", tmp_path / "none"))
    assert f"{tmp_path / 'none'}" in line
    assert "mlsm dictionary" in line
    assert not (data_bin / "valid.codes").exists()


def test_layer_other_than_the_dictionarys_is_refused(
    pipeline: Pipeline, data_bin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failing_mlsm(capsys, *encode_words(pipeline, data_bin, "--layer", 1))
    assert "learned from layer 2, not from --layer 1" in line
    assert not (data_bin / "valid.codes").exists()


def test_checkpoint_other_than_the_dictionarys_is_refused(
    pipeline: Pipeline, data_bin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.load(pipeline.auxiliary, weights_only=True)
    state["model"]["encoder.sentence_encoder.embed_tokens.weight"][5, 0] += 1
    torch.save(state, tmp_path / "other.pt")
    line = failing_mlsm(capsys, *encode_words(pipeline, data_bin, "--auxiliary", tmp_path / "other.pt"))
    assert "another auxiliary checkpoint" in line
    assert not (data_bin / "valid.codes").exists()


@pytest.mark.slow
def test_truncated_shard_stops_training_in_one_line_and_coding_again_repairs_it(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    data = shutil.copytree(pipeline.data_bin, tmp_path / "data-bin")
    shard = data / "valid.codes" / "shard-00000.weights.npy"
    shard.write_bytes(shard.read_bytes()[:-100])

    run = fairseq_train(data, tmp_path / "model", "--max-update", 1, "--no-save", check=False)
    assert run.returncode != 0
    errors = [line for line in run.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert str(shard) in errors[0]
    assert "mlsm encode" in errors[0]
    assert "Traceback" not in run.stderr

    mlsm(*encode_words(pipeline, data))
    assert contents(data / "valid.codes") == contents(pipeline.data_bin / "valid.codes")


@pytest.mark.slow
def test_blocks_longer_than_the_models_positions_are_refused(
    pipeline: Pipeline, data_bin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails_and_then_the_right_command_works(
        capsys, pipeline, data_bin, *encode_words(pipeline, data_bin, "--tokens-per-sample", 65)
    )
    assert "--tokens-per-sample 65" in line
    assert "64 positions" in line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, value) for option in ("--lambda", "--tolerance", "--shard-tokens") for value in (0, -1)),
        *((option, 0) for option in ("--threads", "--batch-tokens")),
        *(("--tokens-per-sample", value) for value in (-5, 0, 1)),
    ],
)
def test_number_that_makes_no_sense_is_refused_by_name(
    pipeline: Pipeline, data_bin: Path, capsys: pytest.CaptureFixture[str], option: str, value: object
) -> None:
    line = failing_mlsm(capsys, *encode_words(pipeline, data_bin), option, value)
    assert option in line
    assert str(value) in line
    assert not (data_bin / "valid.codes").exists()


@pytest.mark.slow
def test_run_warns_early_of_a_disk_that_will_be_full(
    pipeline: Pipeline, data_bin: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    mlsm(*encode_words(pipeline, data_bin, *SHARDS, "--coverage", 0.3))
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "are free" in warned[0].getMessage()
