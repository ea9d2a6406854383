"""``mlsm npm datastore``: what it says while it builds, resumes and adds an index."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import failing_mlsm, mlsm
from tests.tiny_models import TRAINED_TOKENS, TinyData, save_untrained_npm

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(tiny: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained_npm(tiny, tmp_path_factory.mktemp("npm") / "model")


def words(tiny: TinyData, checkpoint: Path, output: Path, *options: object) -> tuple[object, ...]:
    build = ("npm", "datastore", tiny.data_bin, "--checkpoint", checkpoint, "--output", output)
    return (*build, "--splits", "valid", "--shard-tokens", 2000, *options)


def test_store_is_built_once_and_gets_an_index(
    tiny: TinyData, checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    mlsm(*words(tiny, checkpoint, tmp_path / "store"))
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r".*/store: ([\d,]+) keys of ([\d,]+) tokens, 32 wide, .* bytes a token\), [\d.]+ s", last)
    assert found
    keys, tokens = (int(number.replace(",", "")) for number in found.groups())
    assert 0.9 * tokens < keys < tokens
    meta = json.loads((tmp_path / "store" / "meta.json").read_text())
    assert meta["blocks"]["tokens_per_sample"] == TRAINED_TOKENS  # what the model was trained on
    mlsm(*words(tiny, checkpoint, tmp_path / "store"))
    assert "nothing to do" in capsys.readouterr().out
    mlsm(*words(tiny, checkpoint, tmp_path / "store", "--index", "flat"))
    assert "nothing to do" not in capsys.readouterr().out
    mlsm(*words(tiny, checkpoint, tmp_path / "store", "--index", "flat"))
    assert "nothing to do" in capsys.readouterr().out


def test_processes_say_who_is_done(tiny: TinyData, checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    share = words(tiny, checkpoint, tmp_path / "store", "--num-processes", 2, "--process-index")
    mlsm(*share, 1)
    assert "process 1 of 2 is done; shards of other processes are missing" in capsys.readouterr().out
    mlsm(*share, 0)
    assert "bytes a token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--threads", 0), "--threads must be positive, got 0"),
        (("--batch-tokens", -1), "--batch-tokens must be positive, got -1"),
        (("--shard-tokens", 0), "--shard-tokens must be positive, got 0"),
        (("--tokens-per-sample", 1), "--tokens-per-sample must be at least 2"),
        (("--tokens-per-sample", 100), "--tokens-per-sample 100"),
        (("--splits", "test"), "no binarized split at"),
        (("--splits", "valid", "train", "valid"), "--splits valid train valid names a split twice"),
        (("--num-processes", 2), "--process-index and --num-processes belong together"),
        (("--drop-stopwords", "absent.txt"), "absent.txt"),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    tiny: TinyData, checkpoint: Path, tmp_path: Path, capsys: Capture, options: tuple[object, ...], message: str
) -> None:
    assert message in failing_mlsm(capsys, *words(tiny, checkpoint, tmp_path / "store", *options))
    assert not (tmp_path / "store").exists()


def test_store_does_not_mix_with_the_dataset_or_the_model(tiny: TinyData, checkpoint: Path, capsys: Capture) -> None:
    model = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for folder in (tiny.data_bin, model):
        before = sorted(folder.iterdir())
        assert "holds the dataset or the model" in failing_mlsm(capsys, *words(tiny, checkpoint, folder))
        assert sorted(folder.iterdir()) == before
