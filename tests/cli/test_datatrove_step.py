"""``mlsm`` commands as steps of datatrove: the result is that of one process, also if a task was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from mlsm_plugin.cli.datatrove_step import EncodeCorpus
from tests.cli.coding_runs import contents, copy_without_codes, encode_words, kill_once_there
from tests.conftest import REPOSITORY, Pipeline, mlsm
from tests.search.searched import make_encoder, write_documents
from tests.tiny_models import TinyData

SMALL_SHARDS = ("--shard-tokens", 100, "--batch-tokens", 200, "--threads", 1)
EXAMPLE = REPOSITORY / "examples" / "datatrove"


def test_what_the_executor_decides_is_refused() -> None:
    for words in (("data", "--process-index", "1"), ("data", "--num-processes=2")):
        with pytest.raises(ValueError, match="is decided by the executor; leave it out"):
            EncodeCorpus(*words)


def test_a_failed_coding_is_a_failed_task(tmp_path: Path) -> None:
    step = EncodeCorpus(str(tmp_path / "none"), "--auxiliary", "aux.pt", "--dictionary", "dict")
    with pytest.raises(OSError, match="none"):
        list(step.run(rank=1, world_size=2))


def test_words_that_are_wrong_usage_are_a_failed_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"`mlsm encode data --thread 2` is wrong usage; the output of the process"):
        list(EncodeCorpus("data", "--thread", "2").run())
    assert "the following arguments are required: --auxiliary, --dictionary" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_settings_without_a_step_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("enocde: [data-bin]\nexecutor: {tasks: 1}\n", encoding="utf-8")
    command = [sys.executable, EXAMPLE / "run_tasks.py", tmp_path / "settings.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert "settings.yaml has neither encode nor index" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_tasks_code_what_one_process_codes_and_a_killed_run_goes_on(pipeline: Pipeline, tmp_path: Path) -> None:
    alone = copy_without_codes(pipeline.data_bin, tmp_path / "alone")
    mlsm(*encode_words(pipeline, alone, *SMALL_SHARDS))
    data = copy_without_codes(pipeline.data_bin, tmp_path / "data-bin")
    words = encode_words(pipeline, data, *SMALL_SHARDS)[1:]
    run_killed_and_again(tmp_path, "encode", words, data / "valid.codes")
    assert contents(data / "valid.codes") == contents(alone / "valid.codes")
    assert len(list((tmp_path / "logs" / "completions").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_tasks_index_what_one_process_indexes_and_a_killed_run_goes_on(tiny: TinyData, tmp_path: Path) -> None:
    model, dictionary = make_encoder(tiny.text, tmp_path)
    write_documents(tiny.text, tmp_path / "docs.txt")
    words: list[object] = [tmp_path / "docs.txt", "--model", model, "--dictionary", dictionary]
    words += ["--shard-documents", 3, "--threads", 1, "--output"]
    mlsm("search", "index", *words, tmp_path / "alone")
    run_killed_and_again(tmp_path, "index", [*words, tmp_path / "index"], tmp_path / "index")
    assert contents(tmp_path / "index") == contents(tmp_path / "alone")
    assert len(list((tmp_path / "index-logs" / "completions").iterdir())) == 2


def run_killed_and_again(folder: Path, step: str, words: Sequence[object], output: Path) -> None:
    """Run an example with other words: killed as soon as the output is begun, run to its end, and once more."""
    settings = yaml.safe_load((EXAMPLE / f"{step}.yaml").read_text(encoding="utf-8"))
    settings[step] = [str(word) for word in words]
    settings["executor"]["start_method"] = "fork"  # of this process, which need not import anything
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [sys.executable, EXAMPLE / "run_tasks.py", folder / "settings.yaml"]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    kill_once_there(process, output / "plan.json")
    assert not (output / "meta.json").exists()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    again = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    assert "all 2 tasks have already been completed" in again.stderr
