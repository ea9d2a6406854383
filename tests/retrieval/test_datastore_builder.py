"""Building a datastore: its keys, interruptions, several processes, other plans, damaged files."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlsm_plugin import hub
from mlsm_plugin.core.masking.word_boundaries import PieceClasses, word_boundaries
from mlsm_plugin.fairseq_plugin.coding.block_reader import BlockSettings
from mlsm_plugin.retrieval import DatastoreSettings, PhraseDatastore
from mlsm_plugin.retrieval.datastore_builder import ids_of_words, read_stopwords
from tests.cli.coding_runs import contents, kill_once_there, split_tokens, start_mlsm
from tests.conftest import Pipeline, failing_mlsm, mlsm
from tests.fairseq_process import LARGEST_FILE
from tests.retrieval.conftest import Retrieval, build_words

Capture = pytest.CaptureFixture[str]


SLOW = pytest.mark.slow
FURTHER = ["shard-00000.positions.npy", "tokens.npy", "block_starts.npy", "dict.txt"]


@pytest.fixture(scope="module")
def store(retrieval: Retrieval) -> PhraseDatastore:
    return PhraseDatastore(retrieval.store)


@pytest.fixture(scope="module")
def uninterrupted(
    retrieval: Retrieval, tmp_path_factory: pytest.TempPathFactory, warm_python_in_module: Path
) -> dict[str, bytes]:
    """The files that one process writes."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "store"
    run = start_mlsm(*build_words(retrieval, folder, "--shard-tokens", 500, "--threads", 1))
    _, errors = run.communicate()
    assert run.returncode == 0, errors
    return contents(folder)


def is_content(tokens: np.ndarray) -> np.ndarray:
    return ~np.isin(tokens, (0, 1, 2))


def test_options_choose_the_keys(retrieval: Retrieval, store: PhraseDatastore, tmp_path: Path) -> None:
    stopwords = tmp_path / "stopwords.txt"
    stopwords.write_text("the\nOf\n", encoding="utf-8")
    options = ("--word-boundaries-only", "--drop-stopwords", stopwords, "--dtype", "float32")
    mlsm(*build_words(retrieval, tmp_path / "some", *options))
    some = PhraseDatastore(tmp_path / "some")
    dictionary = hub.from_pretrained(retrieval.checkpoint).task.source_dictionary
    pieces = PieceClasses.of_vocabulary(dictionary.symbols, [0, 1, 2, 3])
    text = np.asarray(store.tokens, dtype=np.int64)
    begins, ends = word_boundaries(text, np.zeros(len(text), np.int64), pieces)
    dropped = np.isin(text, [dictionary.index(piece) for piece in ("▁the", "▁of", "▁The", "▁Of", "the", "of")])
    dropped &= text != dictionary.unk()
    expected = np.flatnonzero(is_content(text) & (begins | ends) & ~(dropped & begins & ends))
    assert 1000 < len(expected) < len(store) - 100
    assert np.array_equal(some.positions_of(np.arange(len(some))), expected)
    rows = store.rows_of(expected)
    assert np.allclose(some.keys_of(np.arange(len(some))), store.keys_of(rows), atol=3e-3)
    assert np.load(tmp_path / "some" / "shard-00000.keys.npy").dtype == np.float32


def test_several_splits_follow_each_other(retrieval: Retrieval, store: PhraseDatastore, tmp_path: Path) -> None:
    words = [*build_words(retrieval, tmp_path / "two")]
    words[words.index("valid") : words.index("valid") + 1] = ["valid", "valid1"]
    data = shutil.copytree(retrieval.data_bin, tmp_path / "data", ignore=shutil.ignore_patterns("*.codes"))
    for suffix in ("idx", "bin"):
        shutil.copy(data / f"valid.{suffix}", data / f"valid1.{suffix}")
    words[2] = data
    mlsm(*words)
    two = PhraseDatastore(tmp_path / "two")
    assert np.array_equal(two.tokens, np.tile(store.tokens, 2))
    assert np.array_equal(two.keys_of(np.arange(len(store))), two.keys_of(np.arange(len(store), 2 * len(store))))
    assert np.array_equal(two.block_starts, np.append(store.block_starts, store.block_starts + len(store.tokens)))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_killed_build_resumes_to_the_same_bytes(
    retrieval: Retrieval, uninterrupted: dict[str, bytes], tmp_path: Path, capsys: Capture
) -> None:
    words = build_words(retrieval, tmp_path / "store", "--shard-tokens", 500, "--threads", 1)
    run = start_mlsm(*words, start_new_session=True)
    kill_once_there(run, tmp_path / "store" / "shard-00001.positions.npy")
    with pytest.raises(ValueError, match="is not complete: run the same `mlsm npm datastore` again"):
        PhraseDatastore(tmp_path / "store")
    kept = (tmp_path / "store" / "shard-00000.keys.npy").stat().st_mtime_ns
    again = start_mlsm(*words)
    output, errors = again.communicate()
    assert again.returncode == 0, errors
    assert "bytes a token" in output
    assert (tmp_path / "store" / "shard-00000.keys.npy").stat().st_mtime_ns == kept
    assert contents(tmp_path / "store") == uninterrupted
    capsys.readouterr()
    mlsm(*words)
    assert "nothing to do" in capsys.readouterr().out


def test_processes_share_the_work(retrieval: Retrieval, tmp_path: Path, capsys: Capture) -> None:
    shards = ("--shard-tokens", 500, "--num-processes", 2, "--process-index")
    mlsm(*build_words(retrieval, tmp_path / "store", *shards, 1))
    assert "shards of other processes are missing" in capsys.readouterr().out
    mlsm(*build_words(retrieval, tmp_path / "store", *shards, 0))
    both, one = PhraseDatastore(tmp_path / "store"), PhraseDatastore(retrieval.store)
    assert both.meta == one.meta
    assert np.allclose(both.keys_of(np.arange(len(both))), one.keys_of(np.arange(len(one))), atol=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_disk_that_fills_up_is_one_line_and_the_same_command_resumes(retrieval: Retrieval, tmp_path: Path) -> None:
    words = build_words(retrieval, tmp_path / "store", "--shard-tokens", 500)
    run = start_mlsm(*words, variables={LARGEST_FILE: "20000"})
    _, errors = run.communicate()
    assert run.returncode == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("mlsm: error: ")]
    assert re.fullmatch(r"mlsm: error: .*/store/shard-\d+\.keys\.npy: File too large", line)
    mlsm(*words)
    assert len(PhraseDatastore(tmp_path / "store")) > 1000


def test_directory_of_something_else_is_left_alone(
    retrieval: Retrieval, pipeline: Pipeline, tmp_path: Path, capsys: Capture
) -> None:
    before = contents(retrieval.store)
    line = failing_mlsm(capsys, *build_words(retrieval, retrieval.store, "--shard-tokens", 500, "--dtype", "float32"))
    assert "was begun with other settings: dtype is 'float16' there and 'float32' now. Delete the folder" in line
    assert line.endswith("or choose another --output")
    other = [*build_words(retrieval, retrieval.store, "--shard-tokens", 500)]
    other[other.index(retrieval.checkpoint)] = pipeline.auxiliary
    assert "fingerprints.checkpoint is " in failing_mlsm(capsys, *other)
    assert contents(retrieval.store) == before
    fill = ("npm", "fill", "A <mask>.", "--checkpoint", pipeline.auxiliary, "--datastore", retrieval.store)
    assert "was built with another checkpoint" in failing_mlsm(capsys, *fill)
    line = failing_mlsm(capsys, *build_words(retrieval, tmp_path / "new", "--tokens-per-sample", 100))
    assert "--tokens-per-sample 100 is more than the 64 positions of the model" in line
    assert not (tmp_path / "new").exists()


def test_lines_between_documents_stay_in_the_text(retrieval: Retrieval, pipeline: Pipeline, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("The name is bound.\n\n\nReturn the value.\nIt is a list.\n\nThe target is the name.\n", "utf-8")
    data = tmp_path / "data"
    mlsm("binarize", "--tokenizer", pipeline.tokenizer, "--train", text, "--valid", text, "--output", data)
    words = build_words(replace(retrieval, data_bin=data), tmp_path / "store", "--sample-break-mode", "complete_doc")
    mlsm(*words)
    store, sentences = PhraseDatastore(tmp_path / "store"), split_tokens(data, "valid")
    assert min(map(len, sentences)) == 1  # a boundary
    tokens = np.concatenate(sentences)
    assert np.array_equal(store.tokens, tokens)
    assert np.array_equal(store.positions_of(np.arange(len(store))), np.flatnonzero(is_content(tokens)))


def settings_of_the_store() -> DatastoreSettings:
    return DatastoreSettings(splits=("valid",), blocks=BlockSettings(48), shard_tokens=500)


def rebuilt(retrieval: Retrieval, directory: Path) -> PhraseDatastore:
    options = {"batch_tokens": 400, "device": "cpu"}
    return PhraseDatastore.build(
        retrieval.data_bin, retrieval.checkpoint, directory, settings_of_the_store(), **options
    )


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_two_processes_at_the_same_time_write_the_bytes_of_one(
    retrieval: Retrieval, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    """With a share each, and both with all of the work, where each seals while the other may still write."""
    for name, shares in (
        ("shares", [("--num-processes", 2, "--process-index", index) for index in (0, 1)]),
        ("same", [()] * 2),
    ):
        words = build_words(retrieval, tmp_path / name, "--shard-tokens", 500, "--threads", 1)
        for run in [start_mlsm(*words, *share) for share in shares]:
            _, errors = run.communicate()
            assert run.returncode == 0, errors
        assert contents(tmp_path / name) == uninterrupted


@pytest.mark.parametrize("damaged", ["shard-00001.keys.npy", *(pytest.param(name, marks=SLOW) for name in FURTHER)])
def test_damaged_file_of_a_sealed_store_is_written_again(retrieval: Retrieval, tmp_path: Path, damaged: str) -> None:
    rebuilt(retrieval, tmp_path / "store")
    whole = contents(tmp_path / "store")
    path = tmp_path / "store" / damaged
    if damaged == "dict.txt":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "store" / f".shard-00000.keys.npy.{'0' * 32}.tmp").write_bytes(b"half")
    rebuilt(retrieval, tmp_path / "store")
    assert contents(tmp_path / "store") == whole


def test_a_complete_store_stays_and_a_begun_one_resumes(retrieval: Retrieval, tmp_path: Path, capsys: Capture) -> None:
    words = build_words(retrieval, tmp_path / "store", "--shard-tokens", 500)
    rebuilt(retrieval, tmp_path / "store")
    whole = contents(tmp_path / "store")
    mlsm(*words)
    assert "nothing to do" in capsys.readouterr().out
    for name in ("meta.json", "tokens.npy", "block_starts.npy", "dict.txt", "shard-00002.positions.npy"):
        (tmp_path / "store" / name).unlink()
    (tmp_path / "store" / f".tokens.npy.{'0' * 32}.tmp").write_bytes(b"half")
    kept = (tmp_path / "store" / "shard-00001.keys.npy").stat().st_mtime_ns
    rebuilt(retrieval, tmp_path / "store")
    assert contents(tmp_path / "store") == whole
    assert (tmp_path / "store" / "shard-00001.keys.npy").stat().st_mtime_ns == kept


def test_plan_and_seal_have_the_keys_of_the_format_in_order(retrieval: Retrieval) -> None:
    plan, meta = (json.loads((retrieval.store / f"{name}.json").read_text()) for name in ("plan", "meta"))
    assert list(plan) == [
        *("format", "num_tokens", "num_shards", "dim", "similarity", "dtype", "splits", "blocks"),
        *("word_boundaries_only", "stopwords", "shard_tokens", "fp16", "fingerprints"),
    ]
    assert list(meta) == [*plan, "num_keys", "shard_keys", "sampled_sha256"]
    assert {key: meta[key] for key in plan} == plan


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one of float16, float32, got 'int8'"):
        DatastoreSettings(dtype="int8")
    with pytest.raises(ValueError, match="splits names no split"):
        DatastoreSettings(splits=())


def test_stopwords_are_lower_case_lines(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("The\n\n  of \n", encoding="utf-8")
    assert read_stopwords(tmp_path / "words") == {"the", "of"}
    assert read_stopwords(None) == frozenset()


@pytest.mark.parametrize("symbols", [["\u2581The", "\u2581of"], ["\u0120The", "of"], ["The", "of"]])
def test_stopwords_are_found_in_every_kind_of_vocabulary(symbols: list[str]) -> None:
    """Those of SentencePiece, of byte-level BPE, and those that mark other pieces than the first of a word."""
    assert ids_of_words(["<s>", *symbols, "\u2581cat", "\u0120cat"], frozenset({"the", "of"})) == [1, 2]
