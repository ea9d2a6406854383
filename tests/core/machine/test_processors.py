"""How long threads wait, and how busy the cores are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlsm_plugin.core.machine import processors
from mlsm_plugin.core.machine.processors import STATISTICS, cores_busy_with_others, usable_cores, wait_briefly
from tests.core.machine.test_memory import python


def test_threads_wait_briefly_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processors.CHOICES:
        monkeypatch.delenv(name, raising=False)
    wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == processors.SPINS
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.slow
def test_the_command_decides_before_torch_is_imported() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in processors.CHOICES}
    command = Path(sys.executable).with_name("mlsm")
    words = [sys.executable, "-X", "importtime", str(command), "--version"]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"\bmlsm_plugin\.core\.machine\.processors\b", run.stderr)
    assert not re.search(r"\btorch\b", run.stderr)
    run = subprocess.run([str(command), "doctor"], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT={processors.SPINS}" in run.stdout


@pytest.mark.slow
@pytest.mark.skipif(not STATISTICS.exists(), reason="needs Linux")
def test_a_busy_process_is_seen_and_this_one_is_not() -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert cores_busy_with_others(0.5) > 0.3
        finally:
            busy.kill()
    alone = python("-c", f"import runpy; print(runpy.run_path({processors.__file__!r})['cores_busy_with_others'](0.1))")
    assert 0 <= float(alone) <= usable_cores() + 0.5


def test_without_statistics_nothing_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "STATISTICS", processors.Path("/proc/no/such/file"))
    assert cores_busy_with_others(0.01) == 0
