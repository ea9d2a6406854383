"""The commands that start at once do what the real ones do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.warm_python import REAL_PYTHON

pytestmark = pytest.mark.slow  # the process that forks them takes seconds to start

SAYS = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['A'], __name__); print('err', file=sys.stderr); "


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "sys.exit('no')", "1 / 0", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("how", ["-c", "-", "file", "-m"])
def test_a_program_ends_as_with_the_real_one(warm_python: Path, tmp_path: Path, how: str, ending: str) -> None:
    code = f"{SAYS}{ending if 'kill' not in ending else 'sys.stdout.flush(); ' + ending}"
    (tmp_path / "own_module.py").write_text(code, encoding="utf-8")
    words = {"-c": ["-c", code], "-": ["-"], "file": ["own_module.py"], "-m": ["-m", "own_module"]}[how]
    environment = {**os.environ, "A": "é"}
    runs = [
        subprocess.run(
            [str(python), *words, "1", "-x"], cwd=tmp_path, env=environment, input=code, capture_output=True,
            encoding="utf-8", check=False,
        )
        for python in (REAL_PYTHON, warm_python)
    ]  # fmt: skip
    real, warm = ((run.returncode, run.stdout, run.stderr.splitlines()[-1]) for run in runs)
    assert warm == real


def test_it_starts_in_a_fraction_of_a_second_and_passes_itself_on(warm_python: Path) -> None:
    code = "import sys, subprocess; assert 'torch' in sys.modules; print(sys.executable)"
    nested = f"{code}; subprocess.run([sys.executable, '-u', '-c', {code!r}], check=True)"
    run = subprocess.run([sys.executable, "-c", nested], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [str(warm_python)] * 2


def test_installed_commands_are_found_by_name(warm_python: Path) -> None:
    for words in (["mlsm", "--version"], ["fairseq-preprocess", "--help"]):
        real = [str(REAL_PYTHON.with_name(words[0])), *words[1:]]
        found, expected = (subprocess.run(run, capture_output=True, text=True, check=True) for run in (words, real))
        assert found.stdout == expected.stdout


def test_what_it_runs_ends_with_it(warm_python: Path, tmp_path: Path) -> None:
    code = f"import time, os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); print(1); time.sleep(600)"
    with subprocess.Popen([warm_python, "-c", code], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.send_signal(signal.SIGKILL)
        assert run.stdout.read() == b""  # nobody has it open
    process = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            break
        time.sleep(0.05)
    else:
        pytest.fail("it still runs")
