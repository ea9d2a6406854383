"""``mlsm babylm push``, against a local stand-in of the hub's HTTP interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsm_plugin.babylm.publishing import push
from tests.babylm.made_run import make_run
from tests.conftest import failing_mlsm
from tests.hub_server import REPO, hub_server, mlsm_with_hub
from tests.tiny_models import TinyData


@pytest.mark.slow
def test_each_checkpoint_goes_to_its_branch_once(tiny: TinyData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(tiny, run)
    names = ["chck_1K", "chck_2K", "main"]
    with hub_server() as (endpoint, there):
        command = ("babylm", "push", run, REPO)
        assert mlsm_with_hub(endpoint, *command) == [f"{name}: pushed" for name in names]
        for name in names:
            files = {file.name: file.read_bytes() for file in (run / "checkpoints" / name).iterdir()}
            assert there.branches[name] == files
        there.branches["chck_2K"].pop("config.json")
        lines = ["chck_1K: up to date", "chck_2K: pushed", "main: up to date"]
        assert mlsm_with_hub(endpoint, *command) == lines
        assert there.commits == [*names, "chck_2K"]


def test_a_dry_run_says_what_would_be_pushed(tmp_path: Path, tiny: TinyData) -> None:
    make_run(tiny, tmp_path)
    lines = list(push(tmp_path, REPO, dry_run=True))
    assert [line.partition(":")[0] for line in lines] == ["chck_1K", "chck_2K", "main"]
    assert all("5 files" in line and f"would be pushed to {REPO}" in line for line in lines)


@pytest.mark.parametrize("name", ["someone/small-0.1", "small", "a/b/c"])
def test_a_name_that_the_pipeline_cuts_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert "the evaluation pipeline cuts a name at a dot" in failing_mlsm(capsys, "babylm", "push", tmp_path, name)
