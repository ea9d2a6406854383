"""What the commands of the comparison cost: processor time, not the time that passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.script_module import load_script

load_script("research/compare_objectives.py")
from comparison.commands import Commands  # noqa: E402

BUSY = "import time\nwhile time.process_time() < 0.6: pass\nbytearray(200_000_000)\n"
IN_A_CHILD = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}], check=True)\n"


@pytest.mark.parametrize("program", [BUSY, IN_A_CHILD.format(busy=BUSY)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.slow
def test_processor_time_is_divided_among_the_threads(tmp_path: Path, program: str, threads: int) -> None:
    script = tmp_path / "busy.py"
    script.write_text(program, encoding="utf-8")
    finished = Commands(tmp_path, threads).run("busy", [script])
    assert 0.6 <= finished.seconds * threads < 3
    assert finished.peak_bytes > 200_000_000


def test_waiting_costs_nothing(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\ntime.sleep(1.5)\n", encoding="utf-8")
    commands = Commands(tmp_path, 1)
    finished = commands.run("waits", [script])
    assert 0 < finished.seconds < 0.5
    script.write_text("raise SystemExit(1)", encoding="utf-8")
    assert commands.run("waits", [script]) == finished  # it is not run again


def test_a_command_whose_cost_counts_does_not_resume(tmp_path: Path) -> None:
    script, made = tmp_path / "makes.py", tmp_path / "made"
    script.write_text(f"import pathlib\npathlib.Path({str(made)!r}).mkdir()\n", encoding="utf-8")
    commands = Commands(tmp_path, 1)
    made.mkdir()  # by a command that was stopped
    finished = commands.run("makes", [script, "--threads", 1], made=made)
    assert commands.run("makes", [script, "--threads", 2], made=made) == finished  # it is not run again
