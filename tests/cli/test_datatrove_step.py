"""``mlsm encode`` as a step of datatrove: the store is that of one process, also if a task was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mlsm_plugin.cli.datatrove_step import EncodeCorpus
from tests.cli.coding_runs import contents, copy_without_codes, encode_words, kill_once_there
from tests.conftest import REPOSITORY, Pipeline, mlsm

SMALL_SHARDS = ("--shard-tokens", 100, "--batch-tokens", 200, "--threads", 1)
SCRIPT = REPOSITORY / "examples" / "datatrove" / "encode.py"


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
def test_tasks_code_what_one_process_codes_and_a_killed_run_goes_on(pipeline: Pipeline, tmp_path: Path) -> None:
    alone = copy_without_codes(pipeline.data_bin, tmp_path / "alone")
    mlsm(*encode_words(pipeline, alone, *SMALL_SHARDS))
    data = copy_without_codes(pipeline.data_bin, tmp_path / "data-bin")
    settings = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text(encoding="utf-8"))
    settings["encode"] = [str(word) for word in encode_words(pipeline, data, *SMALL_SHARDS)[1:]]
    (tmp_path / "encode.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [sys.executable, SCRIPT, tmp_path / "encode.yaml"]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    kill_once_there(process, data / "valid.codes" / "plan.json")
    assert not (data / "valid.codes" / "meta.json").exists()
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert contents(data / "valid.codes") == contents(alone / "valid.codes")
    assert len(list((tmp_path / "logs" / "completions").iterdir())) == 2

    again = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert "all 2 tasks have already been completed" in again.stderr
