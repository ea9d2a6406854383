"""``mlsm encode --estimate``: what coding will take; and a run that sees the disk fill up."""

from __future__ import annotations

import logging
import re
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from tests.cli.coding_runs import (
    SHARDS,
    encode_words,
    meta_of,
)
from tests.conftest import Pipeline, mlsm

Capture = pytest.CaptureFixture[str]


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found.group(1))


@pytest.mark.parametrize("coverage", [1, 0.5])
def test_estimate_is_what_comes_out_and_writes_nothing(
    pipeline: Pipeline, data_bin: Path, valid_tokens: np.ndarray, capsys: Capture, coverage: float
) -> None:
    words = encode_words(pipeline, data_bin, "--coverage", coverage, "--batch-tokens", 4096)
    before = sorted(data_bin.rglob("*"))
    mlsm(*words, "--estimate")
    assert sorted(data_bin.rglob("*")) == before
    said = capsys.readouterr().out
    mlsm(*words)
    meta = meta_of(data_bin / "valid.codes")
    size = sum(path.stat().st_size for path in (data_bin / "valid.codes").glob("*.npy"))
    assert number(r"valid: (\d+) tokens", said) == len(valid_tokens)
    assert number(r"(\d+) to code", said) == pytest.approx(meta["coded_tokens"], rel=0.1)
    assert number(r"([\d.]+) non-zeros a token", said) == pytest.approx(meta["nnz"] / meta["coded_tokens"], rel=0.1)
    assert number(r"  disk: ([\d.]+) MB", said) == pytest.approx(size / 1e6, abs=0.07)
    assert 0.1 < number(r"memory: ([\d.]+) GB a process", said) < 10
    assert "0:00:" in said
    assert "free disk of" in said


def test_estimate_counts_processes_and_warns_of_the_disk(
    pipeline: Pipeline, data_bin: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    flags = ("--shard-tokens", 400, "--num-processes", 3, "--process-index")
    mlsm(*encode_words(pipeline, data_bin, "--estimate", *flags, 0))
    output = capsys.readouterr()
    assert "with 3 processes" in output.out
    assert "has only 0.00 GB free" in output.err
    mlsm(*encode_words(pipeline, data_bin, "--estimate", *flags, 1))  # the first process speaks for all
    assert capsys.readouterr().out == ""


def test_run_warns_early_of_a_disk_that_will_be_full(
    pipeline: Pipeline, data_bin: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    mlsm(*encode_words(pipeline, data_bin, *SHARDS, "--coverage", 0.3))
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "are free" in warned[0].getMessage()
