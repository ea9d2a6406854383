"""``scripts/gpu_check.py``: each step runs, on sizes that say nothing about speed; a step that fails stops no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlsm_plugin.cli.main import COMMANDS
from tests.script_module import load_script, runner_of

gpu_check = load_script("scripts/gpu_check.py")
Step = gpu_check.Step
# in a chain, or no device
ELSEWHERE = {"auxiliary", "average", "binarize", "convert", "doctor", "encode-hf", "explore", "plot"}


def test_each_command_is_in_a_step() -> None:
    check = gpu_check.Check(Path("folder"), "cpu")
    words = {word for step in gpu_check.STEPS if step.command for word in gpu_check.words_of(step, check.names, 0)}
    assert set(COMMANDS) - words - ELSEWHERE == set()


@pytest.mark.slow
def test_all_steps_run_on_a_cpu(
    warm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    status = runner_of(gpu_check, monkeypatch)("--output", tmp_path, "--device", "cpu")
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert (status, found["failed"]) == (0, 0), shown + (tmp_path / "gpu_check.log").read_text(encoding="utf-8")
    assert {row["name"] for row in found["steps"] if row["state"] == "skipped"} == {
        step.name for step in gpu_check.STEPS if step.gpu
    }
    assert all(shown.count(f"\n{row['name']} ") == 2 for row in found["steps"])  # as it ends, and in the table
    assert "Traceback" not in shown


@pytest.mark.slow
def test_a_step_that_fails_or_takes_too_long_stops_only_those_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import sys, time, pathlib; "
    monkeypatch.setattr(gpu_check, "STEPS", [
        Step("broken", "", f'python -c "{program}print(1); sys.exit(\'no such thing\')"'),
        Step("needs-broken", "broken", 'python -c "print(2)"'),
        Step("endless", "", f'python -c "{program}time.sleep(60)"', seconds=1),
        Step("silent", "", 'python -c "print(3)"', r"(\d+) tokens", "tokens"),
        Step("killed", "", f"python -c \"{program}p = pathlib.Path('there'); old = p.exists(); p.touch(); "
             'old or time.sleep(60); print(\'again\', 7)"', r"again (\d)", "of them", kill_at="there", seconds=30),
        Step("one-of-two", "", 'python -c "import sys; sys.exit({copy} and \'it is taken\' or print(\'9 here\'))"',
             r"(\d) here", "here", copies=2, refusal="it is taken"),
    ])  # fmt: skip
    assert runner_of(gpu_check, monkeypatch)("--output", tmp_path, "--device", "cpu") == 1
    rows = {row["name"]: row for row in json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))["steps"]}
    assert {name: (row["state"], row["figure"] or row["error"]) for name, row in rows.items()} == {
        "broken": ("failed", "no such thing"),
        "needs-broken": ("skipped", "needs broken"),
        "endless": ("failed", "not ended after 4 s"),
        "silent": ("failed", "the output has no tokens"),
        "killed": ("ok", "7"),
        "one-of-two": ("ok", "9"),
    }
    assert capsys.readouterr().out.count("no such thing") == 2
    assert runner_of(gpu_check, monkeypatch)("--list", "--only", "needs-broken") == 0
    assert capsys.readouterr().out.splitlines() == ["broken                ", "needs-broken          broken"]
