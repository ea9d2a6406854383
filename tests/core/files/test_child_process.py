from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mlsm_plugin.core.files.output_lock import PARENT, end_with_parent, run_child

CHILD = (
    "import os, sys, time\n"
    "from mlsm_plugin.core.files.output_lock import end_with_parent\n"
    "end_with_parent()\n"
    f"assert {PARENT!r} not in os.environ\n"
    "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
    "time.sleep(60)\n"
)
GRANDPARENT = (
    "import sys\n"
    "from mlsm_plugin.core.files.output_lock import run_child\n"
    "run_child([sys.executable, '-c', sys.argv[1], sys.argv[2]])\n"
)


def waits_for(condition, seconds=120.0):  # a busy machine starts Python slowly
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    marker = tmp_path / "child"
    parent = subprocess.Popen([sys.executable, "-c", GRANDPARENT, CHILD, str(marker)])
    waits_for(lambda: marker.exists() and marker.read_text())
    child = int(marker.read_text())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    waits_for(lambda: not is_running(child), 5)


@pytest.mark.slow
def test_a_child_whose_parent_lives_ends_by_itself():
    assert run_child([sys.executable, "-c", "import mlsm_plugin, time; time.sleep(0.5); raise SystemExit(7)"]) == 7


def test_without_a_parent_nothing_is_watched(monkeypatch):
    monkeypatch.delenv(PARENT, raising=False)
    end_with_parent()
    assert os.getppid() > 0
