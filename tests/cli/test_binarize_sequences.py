"""``mlsm binarize --format sequences``: text to sequences; a stopped run leaves nothing, and bad input is one line."""

from __future__ import annotations

import gzip
import shutil
import signal
import time
from pathlib import Path

import pytest

from mlsm_plugin.huggingface.token_sequences import TokenSequences
from tests.cli.coding_runs import start_mlsm
from tests.conftest import failing_mlsm, mlsm
from tests.huggingface.coded_model import CodedModel, coded_model, files_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory, english_text: tuple[Path, Path]) -> CodedModel:
    return coded_model(tmp_path_factory, english_text[0])


def words(made: CodedModel, output: Path, *more: object, text: Path | None = None) -> tuple[object, ...]:
    return (
        *("binarize", "--format", "sequences", "--train", text or made.text, "--tokenizer", f"hf:{made.model}"),
        *("--output", output, *more),
    )


def test_sequences_are_written_and_the_next_command_is_named(made: CodedModel, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "more.gz").write_bytes(gzip.compress(b"A name is bound.\n"))
    mlsm(*words(made, tmp_path / "tokens"), "--max-length", 40)
    capsys.readouterr()
    mlsm(*words(made, tmp_path / "both"), "--train", made.text, tmp_path / "more.gz")
    printed = capsys.readouterr().out
    both = TokenSequences(tmp_path / "both" / "train")
    assert f"{tmp_path / 'both' / 'train'}: {len(both):,} sequences, {both.num_tokens:,} tokens" in printed
    assert f"mlsm encode {tmp_path / 'both'} --auxiliary hf:{made.model} --dictionary DICT_DIR" in printed
    assert both.starts[1:].max() > 40  # the model takes 70
    assert files_of(tmp_path / "tokens" / "train") == files_of(made.tokens)
    mlsm(*words(made, tmp_path / "tokens"), "--max-length", 40)
    assert "nothing to do" in capsys.readouterr().out


def test_bad_input_is_one_line_and_leaves_nothing(made: CodedModel, tmp_path: Path, capsys: Capture) -> None:
    def refused(*more: object, text: Path | None = None) -> str:
        line = failing_mlsm(capsys, *words(made, tmp_path / "tokens", *more, text=text))
        assert not (tmp_path / "tokens").exists()
        return line

    empty, blank = tmp_path / "empty.txt", tmp_path / "blank.txt"
    empty.touch()
    blank.write_text("\n \n")
    assert "empty.txt is empty" in refused(text=empty)
    assert "holds no text, only blank lines" in refused(text=blank)
    assert "No such file" in refused(text=tmp_path / "absent.txt")
    assert "--max-length must be at least 3" in refused("--max-length", 2)
    assert "is not a folder of a Hugging Face model" in refused("--tokenizer", tmp_path / "nowhere")
    assert "has no readable tokenizer" in refused("--tokenizer", tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"good\n\xff\n")
    assert "latin.txt:2: not UTF-8" in refused(text=tmp_path / "latin.txt")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_killed_run_leaves_no_folder(made: CodedModel, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text(made.text.read_text("utf-8") * 400, encoding="utf-8")
    root = tmp_path / "root"
    root.mkdir()
    process = start_mlsm(*words(made, root / "tokens", text=text))
    deadline = time.monotonic() + 60
    while not list(root.glob("*/*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (root / "tokens" / "train").exists()
    shutil.copyfile(made.text, text)
    mlsm(*words(made, root / "tokens", "--max-length", 40, text=text))
    assert [path.name for path in root.glob("*/*")] == ["train"]  # what the killed one left is removed
    assert files_of(root / "tokens" / "train") == files_of(made.tokens)
