"""The binarized dataset as stock fairseq reads it, and runs that fail or are killed."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from fairseq.data import Dictionary, TokenBlockDataset, data_utils

from mlsm_plugin.cli.main import main
from mlsm_plugin.core.files.atomic_files import sha256_of_files
from mlsm_plugin.fairseq_plugin.text.binarize import binarize, remove_earlier_run

DATA_FILES = ["train.bin", "train.idx", "valid.bin", "valid.idx"]
ALL_FILES = sorted(["binarize.json", "dict.txt", "sentencepiece.bpe.model", *DATA_FILES])


@pytest.fixture(scope="module")
def data_bin(corpus, tokenizer, tmp_path_factory):
    """The corpus binarized by one worker."""
    output = tmp_path_factory.mktemp("binarized") / "data-bin"
    figures = binarize(tokenizer=tokenizer, train=corpus.train, valid=corpus.valid, output=output)
    return output, figures


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def blank_lines(count: int) -> str:
    return "\n" * count


def test_stock_fairseq_loads_what_encode_line_gives(data_bin, loaded, documents):
    output, figures = data_bin
    dictionary = Dictionary.load(str(output / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(output / "train"), dictionary)
    expected = []
    for number, document in enumerate(documents[:-5]):
        if number:
            expected.append([dictionary.eos()])
        for line in document:
            text = " ".join(loaded.processor.encode(line, out_type=str))
            expected.append(dictionary.encode_line(text, add_if_not_exist=False).tolist())
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected
    train = figures.splits["train"]
    assert (train.sentences, train.documents) == (sum(map(len, documents[:-5])), len(documents) - 5)
    assert train.tokens == sum(map(len, expected)) == dataset.sizes.sum()
    assert train.unknown == sum(sentence.count(dictionary.unk()) for sentence in expected)


def test_complete_doc_blocks_stay_within_documents(data_bin, documents):
    output, _ = data_bin
    dictionary = Dictionary.load(str(output / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(output / "valid"), dictionary)
    blocks = TokenBlockDataset(
        dataset, dataset.sizes, 10**6, pad=dictionary.pad(), eos=dictionary.eos(), break_mode="complete_doc"
    )
    assert len(blocks) == 5
    for block, document in zip(blocks, documents[-5:], strict=True):
        assert block.tolist().count(dictionary.eos()) == len(document)


def test_summary_is_figures_and_the_fingerprint_of_the_tokenizer(data_bin, tokenizer):
    output, figures = data_bin
    summary = json.loads((output / "binarize.json").read_text())
    assert summary["tokenizer_sha256"] == sha256_of_files(tokenizer / "sentencepiece.bpe.model")
    assert summary["dictionary_symbols"] == 1001
    for name, split in figures.splits.items():
        assert summary["splits"][name]["tokens"] == split.tokens
        assert summary["splits"][name]["unk_rate"] == pytest.approx(split.unk_rate, abs=1e-7)
    for name in ("dict.txt", "sentencepiece.bpe.model"):
        assert (output / name).read_bytes() == (tokenizer / name).read_bytes()
    assert sorted(path.name for path in output.iterdir()) == ALL_FILES


def test_three_workers_and_gzip_give_the_same_bytes(data_bin, corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("mlsm_plugin.fairseq_plugin.text.binarize.BATCH_CHARACTERS", 3000)
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(corpus.train[0].read_bytes()))
    binarize(
        tokenizer=tokenizer, train=[packed, corpus.train[1]], valid=corpus.valid, output=tmp_path / "out", workers=3
    )
    assert contents(tmp_path / "out") == contents(data_bin[0])


@pytest.mark.parametrize("batch_characters", [1, 12, 1 << 18])
def test_document_boundaries_whatever_the_batches(tokenizer, tmp_path, monkeypatch, batch_characters):
    monkeypatch.setattr("mlsm_plugin.fairseq_plugin.text.binarize.BATCH_CHARACTERS", batch_characters)
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("\n \nthe class\nthe object\n\n\t\n\u200b\n\nthe method\n" + blank_lines(3), encoding="utf-8")
    two.write_text("\u200b\n\nthe value\r\n\r\nthe name", encoding="utf-8")
    figures = binarize(tokenizer=tokenizer, train=[one, two], valid=[two], output=tmp_path / "out")
    train = figures.splits["train"]
    assert (train.sentences, train.documents, train.dropped) == (5, 4, 2)
    dataset = data_utils.load_indexed_dataset(str(tmp_path / "out" / "train"), None)  # unmaps `sizes` when collected
    assert [size == 1 for size in dataset.sizes] == [False, False, True, False, True, False, True, False]


def test_special_words_in_the_text_train_without_a_mask_token(tokenizer, tmp_path):
    path = tmp_path / "text"
    path.write_text("a <mask> and\n<mask>\n<pad> <s> </s> <unk>\n<s>\n", encoding="utf-8")
    binarize(tokenizer=tokenizer, train=[path], valid=[path], output=tmp_path / "out")
    dictionary = Dictionary.load(str(tmp_path / "out" / "dict.txt"))
    special = {dictionary.add_symbol("<mask>"), dictionary.bos(), dictionary.pad(), dictionary.unk()}
    dataset = data_utils.load_indexed_dataset(str(tmp_path / "out" / "train"), dictionary)
    assert len(dataset) == 4
    for i in range(len(dataset)):
        assert not special & set(dataset[i].tolist())
        assert dataset[i].tolist().count(dictionary.eos()) == 1


def test_too_many_unknown_tokens_name_the_characters(corpus, tokenizer, tmp_path, capsys):
    path = tmp_path / "russian.txt"
    path.write_text("ёё щ ё\nthe class\n" * 20, encoding="utf-8")
    command = ["binarize", "--tokenizer", str(tokenizer), "--train", str(corpus.train[0]), "--valid", str(path)]
    command += ["--output", str(tmp_path / "out"), "--workers", "1"]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert re.search(
        r"\d\d\.\d\d% of the tokens of the valid split are unknown, above the limit of 1\.00%", captured.err
    )
    assert "'ё' U+0451 (60 times), 'щ' U+0449 (20 times)" in captured.err
    assert captured.err.count("\n") == 1
    assert [item.name for item in tmp_path.iterdir()] == ["russian.txt"]
    assert main([*command, "--max-unk-rate", "1"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[:3]] == ["split", "train", "valid"]
    assert len({len(line) for line in table[:3]}) == 1


@pytest.fixture
def bad(tmp_path, corpus, tokenizer):
    """Arguments that work, to be spoilt by a test."""
    return {
        "--tokenizer": str(tokenizer),
        "--train": str(corpus.train[0]),
        "--valid": str(corpus.valid[0]),
        "--output": str(tmp_path / "out"),
        "--workers": "2",
    }


def spoil(case: str, arguments: dict[str, str], folder) -> None:
    path = folder / "spoilt"
    tokenizer = folder / "tok"
    if case.startswith("tokenizer"):
        tokenizer.mkdir()
        for name in ("dict.txt", "sentencepiece.bpe.model"):
            with open(os.path.join(arguments["--tokenizer"], name), "rb") as file:
                (tokenizer / name).write_bytes(file.read())
        arguments["--tokenizer"] = str(tokenizer)
    if case == "tokenizer of another dictionary":
        lines = (tokenizer / "dict.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        (tokenizer / "dict.txt").write_text("".join(lines[::-1]), encoding="utf-8")
    elif case == "latin-1":
        path.write_bytes(b"fine\n" * 3000 + b"caf\xe9\n" + b"fine\n" * 3000)
        arguments["--valid"] = str(path)
    elif case in ("empty", "blank"):
        path.write_text("" if case == "empty" else " \n\n")
        arguments["--valid"] = str(path)
    elif case == "nothing left":
        path.write_text("\u200b\n", encoding="utf-8")
        arguments["--valid"] = str(path)
    elif case == "missing":
        arguments["--train"] = str(path)
    elif case == "output is a file":
        path.write_text("x")
        arguments["--output"] = str(path)
    elif case == "no workers":
        arguments["--workers"] = "0"
    elif case == "rate":
        arguments["--max-unk-rate"] = "3"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("tokenizer of another dictionary", r"dict\.txt was not made from sentencepiece\.bpe\.model"),
        ("latin-1", r"spoilt:3001: not UTF-8 \(byte 0xe9 at column 4\)"),
        ("empty", "spoilt is empty"),
        ("blank", "spoilt holds no text, only blank lines"),
        ("nothing left", "the valid split has no tokens after normalization"),
        ("missing", "spoilt: No such file or directory"),
        ("output is a file", "spoilt exists and is not a folder"),
        ("no workers", "--workers must be at least 1, got 0"),
        ("rate", "--max-unk-rate must be from 0 to 1, got 3.0"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(bad, tmp_path, capfd, case, message):
    spoil(case, bad, tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert main(["binarize", *(word for pair in bad.items() for word in pair)]) == 1
    captured = capfd.readouterr()
    assert re.fullmatch(f"mlsm: error: .*{message}.*\n", captured.err), captured.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_failed_rerun_leaves_the_earlier_data_and_a_good_one_replaces_all_of_it(
    corpus, tokenizer, tmp_path, capsys, bad
):
    output = tmp_path / "out"
    options = {"tokenizer": tokenizer, "train": corpus.train[:1], "output": output}
    binarize(valid=corpus.valid, test=corpus.valid, **options)
    before = contents(output)
    assert sorted(before) == sorted([*ALL_FILES, "test.bin", "test.idx"])
    spoil("latin-1", bad, tmp_path)
    assert main(["binarize", *(word for pair in bad.items() for word in pair)]) == 1
    assert "not UTF-8" in capsys.readouterr().err
    assert contents(output) == before
    (output / "train.codes").mkdir()
    binarize(valid=corpus.valid, **options)
    assert sorted(path.name for path in output.iterdir()) == sorted([*ALL_FILES, "train.codes"])


def test_a_crash_while_files_are_moved_leaves_no_index_of_another_run(corpus, tokenizer, tmp_path, monkeypatch):
    output = tmp_path / "out"
    options = {"tokenizer": tokenizer, "valid": corpus.valid, "output": output}
    binarize(train=corpus.train, **options)
    replace = os.replace

    def stop_at_the_index(source, target):
        if str(target).endswith("train.idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_at_the_index)
    with pytest.raises(KeyboardInterrupt):
        binarize(train=corpus.train[:1], **options)
    monkeypatch.undo()
    assert sorted(path.name for path in output.iterdir()) == ["dict.txt", "sentencepiece.bpe.model", "train.bin"]
    binarize(train=corpus.train, **options)
    assert sorted(path.name for path in output.iterdir()) == ALL_FILES


STALLING_RUN = """
import pathlib, sys, time
from mlsm_plugin.fairseq_plugin.text import binarize as module

tokenizer, train, valid, output, marker = sys.argv[1:]
read_text = module.read_text


def stall(paths, report):
    yield from read_text(paths, report)
    if paths == [valid]:
        pathlib.Path(marker).touch()
        time.sleep(600)


module.read_text = stall
module.binarize(tokenizer=tokenizer, train=[train], valid=[valid], output=output, workers=2)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_whole_and_the_next_one_cleans_up(corpus, tokenizer, data_bin, tmp_path):
    long, marker = tmp_path / "long", tmp_path / "marker"
    long.write_text("some words of a sentence\n" * 100_000)  # several batches, so that workers exist
    paths = [tokenizer, corpus.train[0], long, tmp_path / "out", marker]
    process = subprocess.Popen([sys.executable, "-c", STALLING_RUN, *map(str, paths)], start_new_session=True)
    wait_until(marker.exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (leftover,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert leftover.name.startswith(".out.")
    assert (leftover / "train.idx").exists()
    assert not (leftover / "valid.idx").exists()
    wait_until(lambda: not group_is_alive(process.pid))  # workers do not outlive a killed parent
    binarize(tokenizer=tokenizer, train=corpus.train, valid=corpus.valid, output=tmp_path / "out", workers=2)
    assert contents(tmp_path / "out") == contents(data_bin[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long", "marker", "out"]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group_is_alive(group: int) -> bool:
    """Whether a thread that is not a zombie is in the group: the other threads of a zombie may still hold its locks."""
    for path in Path("/proc").glob("[0-9]*/task/*/stat"):
        try:
            state, _parent, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tokenizer, documents, tmp_path, monkeypatch):
    monkeypatch.setattr("mlsm_plugin.fairseq_plugin.text.binarize.BATCH_CHARACTERS", 1 << 14)
    monkeypatch.setattr("mlsm_plugin.fairseq_plugin.compat.binarized_files.POINTERS_AT_A_TIME", 1 << 10)
    text = "\n".join(line for document in documents for line in document)[:200_000] + "\n"
    peaks = []
    for repeats in (1, 8):
        path = tmp_path / f"text{repeats}"
        path.write_text(text * repeats, encoding="utf-8")
        tracemalloc.start()
        binarize(tokenizer=tokenizer, train=[path], valid=[path], output=tmp_path / "out")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 100_000


@pytest.mark.slow
def test_the_command_prints_nothing_but_one_line_on_an_error(tokenizer, tmp_path):
    command = [sys.executable, "-m", "mlsm_plugin.cli.main", "binarize", "--tokenizer", str(tokenizer)]
    command += ["--train", str(tmp_path / "no"), "--valid", str(tmp_path / "no"), "--output", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"mlsm: error: {tmp_path / 'no'}: No such file or directory\n"


def test_what_is_not_of_a_run_stays(tmp_path):
    for name in ("train.idx", "test.bin", "binarize.json", "notes.txt", "train.txt"):
        (tmp_path / name).touch()
    (tmp_path / "train.codes").mkdir()
    (tmp_path / "hf_tokenizer").mkdir()
    remove_earlier_run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "train.codes", "train.txt"}
    remove_earlier_run(tmp_path / "absent")
